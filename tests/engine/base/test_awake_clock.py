"""A peer's time does not count while this process stands still, and is over only for who has looked once more."""

from __future__ import annotations

import pytest

from engine.base.awake_clock import STILL_S, AwakeClock, Patience


def test_the_clock_counts_no_long_gap() -> None:
    now = 0.0
    clock = AwakeClock(lambda: now)
    for gap, awake in ((0.4, 0.4), (60.0, 0.4 + STILL_S), (0.1, 0.5 + STILL_S), (STILL_S, 0.5 + 2 * STILL_S)):
        now += gap
        assert clock.now() == pytest.approx(awake)


def test_patience_does_not_end_with_a_pause_and_not_before_another_look() -> None:
    now = 0.0
    patience = Patience(2.0, lambda: now)
    asked = list[bool]()
    for gap in (60.0, 60.0, 60.0, 0.4, 0.4):
        now += gap
        asked.append(patience.is_over())
    assert asked == [False, False, False, False, False]  # 2.3 s were awake ones: the time is over since the last
    assert patience.is_over()
