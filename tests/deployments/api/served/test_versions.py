"""Sessions are divided among versions by weight, and move only to a version whose weight rises."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.api.served.versions import Versions
from deployments.config.versions import VersionPlan

SESSIONS = [f"session-{number}" for number in range(2000)]
WEIGHTS = st.lists(st.integers(0, 10), min_size=2, max_size=4).filter(any)


def versions(*weights: float, new: str | None = None) -> Versions:
    return Versions(VersionPlan("chat", {f"v{at}": float(weight) for at, weight in enumerate(weights)}, new))


def chosen(divided: Versions) -> list[str]:
    return [divided.choose(session) for session in SESSIONS]


@given(WEIGHTS)
def test_shares_are_as_the_weights(weights: list[int]) -> None:
    counts = Counter(chosen(versions(*weights)))
    for at, weight in enumerate(weights):
        share = weight / sum(weights)
        # Five standard deviations of a share of 2000 are at most 0.056; without a weight there is none.
        assert counts[f"chat@v{at}"] / len(SESSIONS) == pytest.approx(share, abs=0.056 if weight else 0)


@given(WEIGHTS, st.integers(0, 3), st.integers(1, 10))
def test_a_version_whose_weight_rises_takes_sessions_and_gives_none_away(
    weights: list[int], at: int, more: int
) -> None:
    at %= len(weights)
    before, raised = chosen(versions(*weights)), list(weights)
    raised[at] += more
    for old, new in zip(before, chosen(versions(*raised)), strict=True):
        assert new in (old, f"chat@v{at}")


@given(st.lists(st.floats(0, 100), min_size=2, max_size=6))
def test_in_a_rollout_sessions_move_to_the_new_version_once(percents: list[float]) -> None:
    plan = VersionPlan("chat", {"v1": 3.0, "v2": 1.0, "v3": 0.0}, "v3")
    divided, before = Versions(plan), chosen(Versions(plan))
    for percent in sorted(percents):
        divided.weights = plan.weights_at(percent)
        now = chosen(divided)
        assert all(new in (old, "chat@v3") for old, new in zip(before, now, strict=True))
        before = now
    divided.weights = plan.weights_at(100)
    assert set(chosen(divided)) == {"chat@v3"}


def test_without_a_session_the_version_with_the_most_is_meant() -> None:
    assert versions(1, 3).choose(None) == "chat@v1"


def test_any_text_is_a_session() -> None:
    for session in ("", "\0", "\ud800", "x" * 100_000):
        assert versions(1, 1).choose(session) == versions(1, 1).choose(session)
