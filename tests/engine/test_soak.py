"""The soak of `benchmarks/soak.py`, as much of it as CI has time for: always the same episodes."""

from __future__ import annotations

import pytest

from benchmarks.soak import STEPS
from benchmarks.soak_episode import Episode

NUM_EPISODES = 60
GROUPS = 4
"""So that they spread over the processes that run the tests."""


@pytest.mark.parametrize("group", range(GROUPS))
def test_everybody_is_served_whatever_happens_and_nothing_is_held_in_the_end(group: int) -> None:
    for number in range(group, NUM_EPISODES, GROUPS):
        Episode(f"ci.{number}").run(STEPS)
