"""The engine's steps, load and events as metrics."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from msgspec import structs

from cache import CacheStats, PageAccount, StateAccount
from cache.figures.page_ages import EvictedPage
from deployments.replica.devices import gpu_utilization
from deployments.replica.metrics import EngineMetrics
from engine.grammar.compiler import Compiler
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import Vocabulary
from engine.host_tier.host_pool import HostAccount, HostTraffic
from engine.host_tier.lower_tier import TierTotals
from engine.host_tier.peers import PeerTotals
from engine.models.expert_load import ExpertLoad
from engine.scheduling.stats import EngineLoad, StageSeconds, StepStats
from engine.values.beam_search import Hypothesis
from engine.values.stream_delta import StreamDelta
from monitoring.metrics import Metrics
from tests.engine.support.grammar_models import EOS, NUM_TOKENS, tokenizer
from tests.support.metric_values import observations_of


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
    cache = CacheStats(query_tokens=10, hit_tokens=4, host_hit_tokens=3, evicted_pages=7, reset_pages=2)
    cache.recompute_hit_tokens, cache.recompute_host_tokens = 5, 6
    pages = PageAccount(free=1, evictable=2, locked=3, private=4, lent=5)
    host = HostAccount(free=11, held=12, cached=13, arriving=14, lent=15)
    states = StateAccount(free=16, evictable=17, locked=18, private=19)
    load = EngineLoad(num_waiting=5, num_deferred=2, pages=pages, states=states, cache=cache, host_pages=host)
    compiler = Compiler(lambda: Vocabulary.of(tokenizer(), NUM_TOKENS, [EOS]))
    for letter in "abaa":
        compiler.compile(Grammar("regex", letter))
    engine.on_grammars(compiler)
    engine.on_load(
        structs.replace(
            load,
            num_preemptions=9,
            num_swapped=2,
            num_host_evicted=8,
            host_traffic=HostTraffic(5, 3, 100, 1.5),
            lower_tier=TierTotals(saved=6, loaded=2, failed=1, page_bytes=100, held=21),
            peers=PeerTotals(loaded=9, failed=4),
        )
    )
    engine.on_lent(7, 100)
    engine.on_notices({"aws": 2})
    engine.on_kv_events(Counter(stored=7, removed=4, snapshot=2))
    values, counts = observations_of(metrics)
    assert values["engine_stage_seconds_total"] == pytest.approx(
        {("schedule",): 0.002, ("prepare",): 0.002, ("forward",): 0.010, ("sample",): 0.003, ("output",): 0.004}
    )
    assert values["engine_steps_total"] == {(): 3}
    assert values["generation_tokens_total"] == {(): 1 + 3 + 2}
    assert values["engine_graph_replays_total"] == {("graph",): 1, ("eager",): 2}
    assert values["grammar_cache_requests_total"] == {("hit",): 2, ("miss",): 2}
    assert values["grammar_cache_bytes"] == {(): compiler.num_bytes} and compiler.num_bytes > 0
    assert values["spec_draft_tokens_total"] == {(): 8}
    assert values["spec_accepted_tokens_total"] == {(): 5}
    assert values["state_slots"] == {("free",): 16, ("running",): 19, ("snapshot",): 17 + 18}
    assert values["requests_waiting"] == {("capacity",): 3, ("deferred",): 2}
    moved = {("host", "out"): 5, ("host", "in"): 3, ("file", "out"): 6, ("file", "in"): 2}
    moved |= {("peer", "out"): 7, ("peer", "in"): 9}
    assert values["kv_transfer_pages_total"] == moved
    assert values["kv_transfer_bytes_total"] == {key: 100 * pages for key, pages in moved.items()}
    assert values["kv_transfer_failed_pages_total"] == {("file",): 1, ("peer",): 4}
    assert values["notices_total"] == {("file",): 0, ("url",): 0, ("aws",): 2, ("gcp",): 0, ("azure",): 0}
    assert values["kv_saved_seconds"] == {("host",): 1.5}
    assert values["kv_event_blocks_total"] == {("stored",): 7, ("removed",): 4}
    assert values["kv_event_replays_total"][("snapshot",)] == 2
    evicted = {("device", "capacity"): 7, ("device", "reset"): 2, ("host", "capacity"): 8, ("host", "reset"): 0}
    assert values["kv_evictions_total"] == evicted
    on_device = {("free", "device"): 1, ("active", "device"): 12, ("cached", "device"): 2}
    in_host = {("free", "host"): 11, ("active", "host"): 41, ("cached", "host"): 13}
    in_files = {("free", "file"): 0, ("active", "file"): 0, ("cached", "file"): 21}
    assert values["kv_pages"] == {**on_device, **in_host, **in_files}
    assert values["kv_pages_capacity"] == {("device",): 15, ("host",): 65}
    assert values["preemptions_total"] == {("recompute",): 7, ("swap",): 2}
    assert values["prefix_cache_recompute_hit_tokens_total"] == {("device",): 5, ("host",): 6}
    assert values["prefix_cache_hit_tokens_total"] == {("device",): 4, ("host",): 3}
    assert values["prompt_tokens_total"] == {("computed",): 3, ("device",): 4, ("host",): 3}
    assert counts["kv_page_lifetime_seconds"] == counts["kv_page_idle_before_evict_seconds"] == 1
    assert counts["engine_step_seconds"] == 3


def test_the_imbalance_of_experts_is_shown_once_tokens_were_counted() -> None:
    metrics = Metrics("m", "r", "engine")
    engine, load = EngineMetrics(metrics), ExpertLoad(1, 4, 2, torch.device("cpu"))
    for counted in (None, load):
        engine.on_expert_load(counted)
        assert "engine_expert_imbalance_ratio" not in observations_of(metrics)[0]
    load.of_layer(0)(torch.tensor([[0, 1]] * 3000 + [[1, 2]] * 1000))
    load.add(torch.arange(4000))
    engine.on_expert_load(load)
    assert observations_of(metrics)[0]["engine_expert_imbalance_ratio"] == {(): 1.75}


def test_an_engine_on_cpus_has_no_gpu_to_be_busy() -> None:
    assert gpu_utilization("cpu") is None
    assert "gpu_utilization_ratio" not in observations_of(Metrics("m", "r", "engine"))[0]
