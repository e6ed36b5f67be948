"""Engine and ingress as numbers: what the engine's and the router's own records become on the page."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from cache import CacheStats, PageAccount
from cache.page_ages import EvictedPage
from deployments.ingress.metrics import IngressMetrics
from deployments.replica.devices import gpu_utilization
from deployments.replica.metrics import EngineMetrics
from engine.beam_search import Hypothesis
from engine.scheduling.stats import EngineLoad, StageSeconds, StepStats
from engine.scheduling.swap import HostAccount
from engine.stream_delta import StreamDelta
from monitoring.metrics import Metrics, Snapshot
from router.cost import Candidate, RouteQuery
from router.fleet import Fleet
from router.placer import Placer, PlacerSettings
from router.policies import Decision, Split
from tests.router.support.fleets import Prompt

Values = dict[tuple[str, ...], float]


def taken(metrics: Metrics) -> tuple[dict[str, Values], dict[str, int]]:
    """Values, and how often each histogram was observed."""
    snapshot = msgspec.msgpack.decode(metrics.snapshot(), type=Snapshot)
    counts = {name: sum(sum(h.counts) for _, h in series) for name, series in snapshot.histograms.items()}
    return {name: dict(series) for name, series in snapshot.values.items()}, counts


def test_an_engines_record_becomes_its_metrics() -> None:
    metrics = Metrics("m", "r", "engine")
    engine = EngineMetrics(metrics)
    engine.on_step(StepStats(StageSeconds(0.001, 0.002, 0.010, 0.003, 0.004), 4, 4, 0, is_replayed=True))
    engine.on_step(StepStats(StageSeconds(0.001), 1, 0, 9))
    engine.on_step(StepStats(StageSeconds(0.0), 2, 2, 0, num_draft_tokens=8, num_accepted_tokens=5))
    found = [Hypothesis((1, 2, 3), -1.0, "stop"), Hypothesis((4, 5), -2.0, "length")]
    engine.on_events(
        [StreamDelta("a", [7]), StreamDelta("b", [1, 2, 3], finish_reason="stop", alternatives=found)]
    )
    engine.on_evicted([EvictedPage(60.0, 5.0)])
    cache = CacheStats(query_tokens=10, hit_tokens=4, evicted_pages=7, reset_pages=2)
    cache.recompute_hit_tokens, cache.recompute_host_tokens = 5, 6
    pages = PageAccount(free=1, evictable=2, locked=3, private=4)
    host = HostAccount(free=11, held=12)
    load = EngineLoad(num_waiting=5, num_deferred=2, pages=pages, cache=cache, host_pages=host)
    engine.on_load(replace(load, num_preemptions=9, num_swapped=2))
    values, counts = taken(metrics)
    assert values["engine_stage_seconds_total"] == pytest.approx(
        {("schedule",): 0.002, ("prepare",): 0.002, ("forward",): 0.010, ("sample",): 0.003, ("output",): 0.004}
    )
    assert values["engine_steps_total"] == {(): 3}
    assert values["generation_tokens_total"] == {(): 1 + 3 + 2}
    assert values["engine_graph_replays_total"] == {("graph",): 1, ("eager",): 2}
    assert values["spec_draft_tokens_total"] == {(): 8}
    assert values["spec_accepted_tokens_total"] == {(): 5}
    assert values["requests_waiting"] == {("capacity",): 3, ("deferred",): 2}
    assert values["kv_evictions_total"] == {("device", "capacity"): 7, ("device", "reset"): 2}
    on_device = {("free", "device"): 1, ("active", "device"): 7, ("cached", "device"): 2}
    in_host = {("free", "host"): 11, ("active", "host"): 12, ("cached", "host"): 0}
    assert values["kv_pages"] == {**on_device, **in_host}
    assert values["kv_pages_capacity"] == {("device",): 10, ("host",): 23}
    assert values["preemptions_total"] == {("recompute",): 7, ("swap",): 2}
    assert values["prefix_cache_recompute_hit_tokens_total"] == {("device",): 5, ("host",): 6}
    assert values["prefix_cache_hit_tokens_total"] == {("device",): 4}
    assert counts["kv_page_lifetime_seconds"] == counts["kv_page_idle_before_evict_seconds"] == 1
    assert counts["engine_step_seconds"] == 3


class Connections:
    def index_lag(self) -> float:
        return 0.7

    def wire_counts(self) -> dict[str, int]:
        return {"gaps": 3}


def test_an_ingresss_routing_becomes_its_metrics() -> None:
    metrics, fleet = Metrics("m", "i", "ingress"), Fleet()
    fleet.update({"a": None, "b": None})
    fleet.mark_lost("b")
    placer = Placer(fleet)
    routing = IngressMetrics(metrics, placer, fleet)
    for number in range(3):
        fleet.open(f"r{number}")
        placer.place(Prompt(f"r{number}", list(range(64))), fleet.names())
    routing.collect(Connections(), num_expected=2)
    values, counts = taken(metrics)
    assert counts["router_decision_seconds"] == sum(values["router_decisions_total"].values()) == 3
    assert values["router_replicas"] == {("available",): 1, ("draining",): 0, ("lost",): 1, ("circuit_open",): 0}
    assert values["replicas_expected"] == {(): 2}
    assert values["router_index_lag_seconds"] == {(): 0.7}
    assert values["wire_dropped_messages_total"]["gaps",] == 3
    routing.collect(None, num_expected=0)
    assert taken(metrics)[0]["replicas_expected"] == {(): 0}


class Mine:
    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        split = Split(replicas)
        return split.decision([candidate.replica for candidate in split.serving], "rule", "mine", query)


def test_a_policy_of_ones_own_is_one_label_whatever_its_name() -> None:
    metrics, fleet = Metrics("m", "i", "ingress"), Fleet()
    fleet.update({"a": None, "b": None})
    placer = Placer(fleet, PlacerSettings(policy=f"{__name__}:Mine"))
    fleet.open("r")
    placer.place(Prompt("r", list(range(64))), fleet.names())
    IngressMetrics(metrics, placer, fleet).collect(None, num_expected=2)
    assert taken(metrics)[0]["router_decisions_total"]["custom", "rule"] == 1


def test_an_engine_on_cpus_has_no_gpu_to_be_busy() -> None:
    assert gpu_utilization("cpu") is None
    assert "gpu_utilization_ratio" not in taken(Metrics("m", "r", "engine"))[0]
