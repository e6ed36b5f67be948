"""The simulated controller beside Serve's own code: means and delays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import TimeStampedValue
from ray.serve._private.metrics_utils import time_weighted_average

from deployments.config.autoscaling import AutoscalingSettings
from deployments.replica.autoscaling import STATS
from deployments.simulator.scaling.controller import SimulatedController, time_weighted_mean


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.floats(-10, 100)), min_size=1, max_size=20),
    st.floats(0.01, 10),
)
def test_means_are_those_that_serve_computes(steps: list[tuple[float, float]], last: float) -> None:
    time, series = 100.0, []
    for pause, value in steps:
        time += pause
        series.append((time, value))
    of_serve = time_weighted_average([TimeStampedValue(*point) for point in series], last_window_s=last)
    assert time_weighted_mean(series, time + last) == pytest.approx(of_serve, abs=1e-6)


def report(**stats: float) -> dict[str, float]:
    return {**dict.fromkeys(STATS, 0.0), **stats}


def controller(target: int = 1, **settings: float) -> SimulatedController:
    values = {
        "min": 1,
        "max": 9,
        "upscale_delay_s": 4.0,
        "downscale_delay_s": 8.0,
        "look_back_s": 5.0,
        "report_s": 1.0,
    }
    return SimulatedController(AutoscalingSettings.model_validate({**values, **settings}), target)


def test_more_replicas_come_when_more_were_needed_for_the_delay_and_fewer_likewise() -> None:
    scaled = controller()
    targets = []
    for second in range(30):
        scaled.record(0, report(busy_share=3.0 if second < 12 else 0.5), float(second))
        targets.append(scaled.decide([0], float(second)))
    up, down = targets.index(4), targets.index(1, targets.index(4))
    assert targets == [1] * up + [4] * (down - up) + [1] * (30 - down)
    assert up == 1 + 4  # a second until it is known, and the delay
    assert 12 + 8 < down <= 12 + 8 + 5 + 1


def test_a_report_is_known_a_period_later_and_forgotten_after_the_look_back() -> None:
    scaled = controller(upscale_delay_s=0)
    scaled.record(0, report(busy_share=5.0), 0.0)
    assert scaled.decide([0], 0.9) == 1
    assert scaled.decide([0], 1.0) == 6
    scaled = controller(upscale_delay_s=0)
    scaled.record(0, report(busy_share=5.0), 0.0)
    scaled.record(0, report(), 5.5)
    assert scaled.decide([0], 6.5) == 1


def test_the_report_of_a_replica_that_no_longer_runs_does_not_count() -> None:
    scaled = controller(upscale_delay_s=0)
    for replica in (0, 1):
        scaled.record(replica, report(busy_share=2.0), 0.0)
    assert scaled.decide([1], 2.0) == 3
