"""What a replica tells of its load that only time shows."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.replica.load import MEASURED_FOR_S, DrainRate, LoadReporter
from engine.scheduling.stats import EngineLoad, StageSeconds, StepStats


class Engine:
    """Load and clock, set by the test."""

    def __init__(self, **load: Any) -> None:
        self.now = 100.0
        self.load = EngineLoad(**load)
        self.reporter = LoadReporter(lambda: self.load, lambda: self.now, max_running=8, max_waiting=2)

    def prefill(self, num_tokens: int) -> None:
        self.reporter.on_step(StepStats(StageSeconds(0.0), 1, 0, num_tokens))


def test_a_rate_counts_when_a_step_of_some_size_has_shown_it_and_for_a_while() -> None:
    engine = Engine(prefill_rate=1000.0)
    engine.prefill(10)
    assert engine.reporter.read().prefill_rate == 0  # a few tokens say nothing of the rate
    engine.prefill(500)
    assert engine.reporter.read().prefill_rate == 0  # nor does the first step
    engine.prefill(500)
    assert engine.reporter.read().prefill_rate == 1000
    engine.now += MEASURED_FOR_S + 1
    assert engine.reporter.read().prefill_rate == 0


def test_the_share_of_time_spent_on_prefill_fades() -> None:
    engine = Engine(prefill_rate=1000.0)
    for _ in range(200):
        engine.now += 0.1
        engine.prefill(50)  # half of the time
    assert engine.reporter.read().prefill_share == pytest.approx(0.5, abs=0.05)
    engine.now += 60
    assert engine.reporter.read().prefill_share < 0.01


def test_a_full_queue_and_a_full_batch_are_told() -> None:
    assert not Engine(num_waiting=1).reporter.read().is_full
    full = Engine(num_waiting=2, num_running=8, decode_seconds=0.02).reporter.read()
    assert (full.is_full, full.max_running, full.decode_rate) == (True, 8, 400)


def test_retry_after_follows_the_measured_rate() -> None:
    rate = DrainRate()
    assert rate.retry_after_s(EngineLoad(num_waiting=1000)) == 1
    for second in range(11):
        rate.observe(float(second), prefill_tokens=1000, num_finished=second * 10)
    assert rate.retry_after_s(EngineLoad(waiting_prefill_tokens=20_000)) == pytest.approx(10, rel=0.2)
    assert rate.retry_after_s(EngineLoad(num_waiting=400)) == pytest.approx(20, rel=0.2)
    assert rate.retry_after_s(EngineLoad(num_waiting=10**6)) == 60
    assert rate.retry_after_s(EngineLoad()) == 1
