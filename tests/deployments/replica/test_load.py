"""The load that a replica reports to routers, to the autoscaler, and to clients that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from cache import PageAccount
from deployments.replica.autoscaling import STATS
from deployments.replica.load import MEASURED_FOR_S, DrainRate, LoadReporter, WorkMeter
from deployments.wire.backlogs import BacklogTotals
from engine.scheduling.stats import EngineLoad, StageSeconds, StepStats


class ReportedEngine:
    """A reporter over a load and a clock that the test sets."""

    def __init__(self, **load: Any) -> None:
        self.now = 100.0
        self.load = EngineLoad(**load)
        self.reporter = LoadReporter(lambda: self.load, lambda: self.now, max_running=8, max_waiting=2)

    def prefill(self, num_tokens: int) -> None:
        self.reporter.on_step(StepStats(StageSeconds(0.0), 1, 0, num_tokens))


def test_a_rate_counts_when_a_step_of_some_size_has_shown_it_and_for_a_while() -> None:
    engine = ReportedEngine(prefill_rate=1000.0)
    engine.prefill(10)
    assert engine.reporter.read().prefill_rate == 0  # a few tokens do not measure the rate
    engine.prefill(500)
    assert engine.reporter.read().prefill_rate == 0  # nor does the first step
    engine.prefill(500)
    assert engine.reporter.read().prefill_rate == 1000
    engine.now += MEASURED_FOR_S + 1
    assert engine.reporter.read().prefill_rate == 0


def test_the_share_of_time_spent_on_prefill_fades() -> None:
    engine = ReportedEngine(prefill_rate=1000.0)
    for _ in range(200):
        engine.now += 0.1
        engine.prefill(50)  # half of the time
    assert engine.reporter.read().prefill_share == pytest.approx(0.5, abs=0.05)
    engine.now += 60
    assert engine.reporter.read().prefill_share < 0.01


def test_a_full_queue_and_a_full_batch_are_reported() -> None:
    assert not ReportedEngine(num_waiting=1).reporter.read().is_full
    full = ReportedEngine(num_waiting=2, num_running=8, decode_seconds=0.02).reporter.read()
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


def step(num_prefill_tokens: int) -> StepStats:
    return StepStats(StageSeconds(0.0, forward=0.1), 1, 0, num_prefill_tokens)


def test_the_meter_reads_queue_rate_and_memory() -> None:
    meter = WorkMeter(page_size=10, max_running=8, now=0.0)
    for _ in range(4):
        meter.on_step(step(1000))
    load = EngineLoad(
        num_running=2,
        num_waiting=4,
        waiting_prefill_tokens=3000,
        pages=PageAccount(600, 100, 200, 100),
        prefill_rate=1000.0,
        num_preemptions=5,
        num_finished=20,
    )
    stats = meter.read(load, BacklogTotals(), now=10.0)
    assert stats == {
        "queued_prefill_s": pytest.approx(3.0),
        "busy_share": pytest.approx(0.4),
        "kv_share": pytest.approx(0.75),  # of the batch's places; 600 of 1000 pages
        "preemptions_per_s": pytest.approx(0.5),
        "unserved_share": pytest.approx(0.3),  # the queue of 3 s was none 10 s ago
        "running": 2,
        "held_back": 0,
        "turned_away_per_s": 0,
        "finished_per_s": pytest.approx(2.0),
        "unserved_per_s": pytest.approx(0.4),
        "waiting": 4,
    }
    later = meter.read(structs.replace(load, num_running=0, num_waiting=0), BacklogTotals(), now=20.0)
    assert later["busy_share"] == later["preemptions_per_s"] == later["unserved_share"] == 0
    assert later["kv_share"] == pytest.approx(0.6)
    assert stats.keys() >= set(STATS)


def test_before_any_rate_is_known_the_longest_wait_stands_for_the_queue() -> None:
    meter = WorkMeter(page_size=16, max_running=256, now=0.0)
    load = EngineLoad(waiting_prefill_tokens=1000, oldest_wait_seconds=4.0, pages=PageAccount(100, 0, 0, 0))
    assert meter.read(load, BacklogTotals(), 1.0)["queued_prefill_s"] == 4.0


def test_the_meter_counts_requests_that_wait_or_are_turned_away_in_ingresses() -> None:
    meter = WorkMeter(page_size=16, max_running=8, now=0.0)
    load = EngineLoad(waiting_prefill_tokens=1000, pages=PageAccount(100, 0, 0, 0), prefill_rate=1000.0)
    first = meter.read(load, BacklogTotals(num_requests=4, num_tokens=9000, unserved_tokens=9000), now=10.0)
    assert (first["queued_prefill_s"], first["held_back"]) == (10.0, 4)
    assert first["unserved_share"] == pytest.approx(1.0)
    meter.on_step(step(500))
    backlog = BacklogTotals(num_requests=6, num_tokens=11_000, turned_away=8, unserved_tokens=14_000)
    second = meter.read(structs.replace(load, waiting_prefill_tokens=500), backlog, now=12.0)
    assert second["turned_away_per_s"] == pytest.approx(4.0)
    # 5,000 tokens more came to the ingresses, and 500 of the engine's queue were served: 4,500 in 2 s.
    assert second["unserved_share"] == pytest.approx(2.25)
    assert second["busy_share"] + second["unserved_share"] == pytest.approx(2.5)
