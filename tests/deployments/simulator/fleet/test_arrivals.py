"""When requests arrive: bursts, which only move requests closer together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.simulator.fleet.arrivals import Burst, arrivals
from tests.router.support.traffic import steady


def test_in_a_burst_requests_come_as_many_times_as_fast_and_later_ones_that_much_sooner() -> None:
    steady_traffic = arrivals(steady(400, 1.0, 512), 1.0, 512.0, 0)
    assert steady_traffic.times[1] - steady_traffic.times[0] == pytest.approx(1.0, rel=0.01)
    burst = steady_traffic.with_burst(Burst(10.0, 100.0, 20.0))
    assert burst.requests == steady_traffic.requests
    per_second = [sum(start <= time < start + 20 for time in burst.times) / 20 for start in (60, 100, 140)]
    assert per_second == pytest.approx([1, 10, 1], rel=0.06)
    assert burst.times[-1] == pytest.approx(steady_traffic.times[-1] - 9 * 20)


@given(st.floats(1, 50), st.floats(0, 100), st.floats(0.1, 100), st.lists(st.floats(0, 500), min_size=2))
def test_requests_keep_their_order_and_none_comes_later(
    factor: float, start: float, seconds: float, times: list[float]
) -> None:
    burst = Burst(factor, start, seconds)
    moved = [burst.moved(time) for time in sorted(times)]
    assert moved == sorted(moved) or moved == pytest.approx(sorted(moved))
    assert all(new <= old + 1e-9 for new, old in zip(moved, sorted(times), strict=True))


def test_bursts_are_written_as_factor_at_start_plus_seconds() -> None:
    assert Burst.parse(" 10@600+300") == Burst(10.0, 600.0, 300.0)
    for wrong in ("10", "10@600", "x@1+1", "10@-1+5", "10@1+1s"):
        with pytest.raises(ValueError, match="10@600"):
            Burst.parse(wrong)
    with pytest.raises(ValueError, match="more than 0 s"):
        Burst.parse("10@600+0")
