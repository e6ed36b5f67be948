"""Turns an engine's steps, load and finished requests into metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add
from typing import TYPE_CHECKING

from cache.figures.page_ages import EvictedPage
from deployments.replica.notice_sources import SourceName
from engine.grammar.compiler import Compiler
from engine.program.precompute import Precomputed
from engine.program.self_test import FailureCause
from engine.scheduling.stats import PHASES, EngineLoad, StageSeconds, StepStats
from engine.values.stream_delta import StreamDelta
from monitoring.metrics import Metrics

if TYPE_CHECKING:
    from engine.models.expert_load import ExpertLoad

_TIER = "device"
_HOST = "host"
"""Tier that may keep the KV of preempted requests."""
_OF_STEPS = ("engine_step_seconds", "engine_batch_requests", "engine_batch_tokens")
_OF_REQUESTS = ("request_queue_seconds", "request_prefill_seconds", "request_decode_seconds")


class EngineMetrics:
    """Writes one engine's metrics. The `on_` methods run in the engine's thread, once per step."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        # Plain numbers, copied before each snapshot: updating a metric costs too much in a small model's step.
        self._stage_seconds = StageSeconds(0.0)
        self._num_generated = self._num_steps = self._num_replayed = self._num_drafts = self._num_accepted = 0
        self._steps = {phase: [metrics.series(name, phase=phase) for name in _OF_STEPS] for phase in PHASES}
        self._requests = [metrics.series(name) for name in _OF_REQUESTS]

    def describe(self, *, version: str, attention: str, device: str, dtype: str, page_size: int) -> None:
        """Set the metrics that do not change while the engine runs."""
        self._metrics.set("build_info", 1, version=version, attention=attention, device=device, dtype=dtype)
        self._metrics.set("kv_page_size_tokens", page_size)

    def on_warm_up(self, done: Precomputed) -> None:
        """Count the prefixes computed before the first request."""
        self._metrics.inc("warm_up_prefixes_total", done.num_prompts)
        self._metrics.inc("warm_up_tokens_total", done.num_tokens)
        self._metrics.inc("warm_up_seconds_total", done.seconds)

    def on_step(self, stats: StepStats) -> None:
        """Count one step."""
        seconds, requests, tokens = self._steps[stats.phase]
        seconds.observe(sum(stats.stages))
        requests.observe(stats.num_requests)
        tokens.observe(stats.num_decode_tokens + stats.num_prefill_tokens + stats.num_draft_tokens)
        self._num_steps += 1
        self._num_replayed += stats.is_replayed
        self._num_drafts += stats.num_draft_tokens
        self._num_accepted += stats.num_accepted_tokens
        self._stage_seconds = StageSeconds(*map(add, self._stage_seconds, stats.stages))

    def on_events(self, events: Sequence[StreamDelta]) -> None:
        """Count the results of a step for its requests."""
        for event in events:
            self._num_generated += len(event.token_ids)
            for hypothesis in (event.alternatives or ())[1:]:
                self._num_generated += len(hypothesis.token_ids)
            if event.timings is not None and event.finish_reason is not None:
                queue, prefill, decode = self._requests
                queue.observe(event.timings.queue)
                prefill.observe(event.timings.prefill)
                decode.observe(event.timings.decode)

    def on_failed_steps(self, counts: Mapping[FailureCause, int]) -> None:
        """Set how many steps have failed, by cause; called before each snapshot."""
        for cause, count in counts.items():
            self._metrics.count_to("engine_failed_steps_total", count, cause=cause)

    def on_evicted(self, pages: Sequence[EvictedPage]) -> None:
        """Observe a sample of the pages evicted since the last call."""
        for page in pages:
            self._metrics.observe("kv_page_lifetime_seconds", page.lifetime)
            self._metrics.observe("kv_page_idle_before_evict_seconds", page.idle)

    def on_grammars(self, compiler: Compiler) -> None:
        """Set the metrics of compiled grammars; called before each snapshot."""
        self._metrics.set("grammar_cache_bytes", compiler.num_bytes)
        self._metrics.count_to("grammar_cache_requests_total", compiler.num_hits, result="hit")
        self._metrics.count_to("grammar_cache_requests_total", compiler.num_misses, result="miss")

    def on_expert_load(self, load: ExpertLoad | None) -> None:
        """Set how unevenly experts load their ranks, if it is counted; called before each snapshot."""
        imbalance = None if load is None else load.imbalance()
        if imbalance is not None:
            self._metrics.set("engine_expert_imbalance_ratio", imbalance)

    def on_kv_events(self, counts: Mapping[str, int]) -> None:
        """Set the counts of events for other systems' routers; called before each snapshot."""
        for event in ("stored", "removed"):
            self._metrics.count_to("kv_event_blocks_total", counts[event], event=event)
        for outcome in ("buffered", "snapshot", "malformed", "broken_off"):
            self._metrics.count_to("kv_event_replays_total", counts[outcome], outcome=outcome)

    def on_notices(self, counts: Mapping[SourceName, int]) -> None:
        """Set the number of notices that this replica's machine ends; called before each snapshot."""
        for source, count in counts.items():
            self._metrics.count_to("notices_total", count, source=source)

    def on_lent(self, num_pages: int, page_bytes: int) -> None:
        """Set how many pages other replicas have fetched; called before each snapshot."""
        self._moved("peer", "out", num_pages, page_bytes)

    def _moved(self, tier: str, direction: str, num_pages: int, page_bytes: int) -> None:
        """Set how many pages were copied to a tier, or from it, since the start."""
        self._metrics.count_to("kv_transfer_pages_total", num_pages, tier=tier, direction=direction)
        num_bytes = num_pages * page_bytes
        self._metrics.count_to("kv_transfer_bytes_total", num_bytes, tier=tier, direction=direction)

    def on_load(self, load: EngineLoad) -> None:
        """Set gauges and totals; called before each snapshot."""
        metrics, pages, cache = self._metrics, load.pages, load.cache
        metrics.set("requests_running", load.num_running)
        metrics.set("requests_waiting", load.num_waiting - load.num_deferred, reason="capacity")
        metrics.set("requests_waiting", load.num_deferred, reason="deferred")
        metrics.set("queue_oldest_age_seconds", load.oldest_wait_seconds)
        metrics.set("waiting_prefill_tokens", load.waiting_prefill_tokens)
        metrics.set("kv_pages", pages.free, state="free", tier=_TIER)
        metrics.set("kv_pages", pages.locked + pages.private + pages.lent, state="active", tier=_TIER)
        metrics.set("kv_pages", pages.evictable, state="cached", tier=_TIER)
        metrics.set("kv_pages_capacity", sum(pages), tier=_TIER)
        states = load.states
        metrics.set("state_slots", states.free, state="free")
        metrics.set("state_slots", states.private, state="running")
        metrics.set("state_slots", states.evictable + states.locked, state="snapshot")
        host = load.host_pages
        metrics.set("kv_pages", host.free, state="free", tier=_HOST)
        metrics.set("kv_pages", host.held + host.arriving + host.lent, state="active", tier=_HOST)
        metrics.set("kv_pages", host.cached, state="cached", tier=_HOST)
        metrics.set("kv_pages_capacity", host.total, tier=_HOST)
        traffic, files, peers = load.host_traffic, load.lower_tier, load.peers
        metrics.set("kv_pages", files.held, state="cached", tier="file")
        self._moved(_HOST, "out", traffic.pages_out, traffic.page_bytes)
        self._moved(_HOST, "in", traffic.pages_in, traffic.page_bytes)
        self._moved("file", "out", files.saved, files.page_bytes)
        self._moved("file", "in", files.loaded, files.page_bytes)
        self._moved("peer", "in", peers.loaded, traffic.page_bytes)
        metrics.count_to("kv_transfer_failed_pages_total", files.failed, tier="file")
        metrics.count_to("kv_transfer_failed_pages_total", peers.failed, tier="peer")
        metrics.set("kv_saved_seconds", traffic.saved_seconds, tier=_HOST)
        for stage, seconds in self._stage_seconds._asdict().items():
            metrics.count_to("engine_stage_seconds_total", seconds, stage=stage)
        metrics.count_to("engine_steps_total", self._num_steps)
        metrics.count_to("engine_graph_replays_total", self._num_replayed, mode="graph")
        metrics.count_to("engine_graph_replays_total", self._num_steps - self._num_replayed, mode="eager")
        metrics.count_to("generation_tokens_total", self._num_generated)
        metrics.count_to("spec_draft_tokens_total", self._num_drafts)
        metrics.count_to("spec_accepted_tokens_total", self._num_accepted)
        metrics.count_to("kv_evictions_total", cache.evicted_pages, tier=_TIER, reason="capacity")
        metrics.count_to("kv_evictions_total", cache.reset_pages, tier=_TIER, reason="reset")
        metrics.count_to("kv_evictions_total", load.num_host_evicted, tier=_HOST, reason="capacity")
        metrics.count_to("preemptions_total", load.num_preemptions - load.num_swapped, mode="recompute")
        metrics.count_to("preemptions_total", load.num_swapped, mode="swap")
        num_found = cache.hit_tokens + cache.host_hit_tokens
        metrics.count_to("prompt_tokens_total", cache.query_tokens - num_found, source="computed")
        metrics.count_to("prompt_tokens_total", cache.hit_tokens, source="device")
        metrics.count_to("prompt_tokens_total", cache.host_hit_tokens, source="host")
        metrics.count_to("prefix_cache_query_tokens_total", cache.query_tokens)
        metrics.count_to("prefix_cache_hit_tokens_total", cache.hit_tokens, tier=_TIER)
        metrics.count_to("prefix_cache_hit_tokens_total", cache.host_hit_tokens, tier=_HOST)
        metrics.count_to("prefix_cache_recompute_query_tokens_total", cache.recompute_query_tokens)
        metrics.count_to("prefix_cache_recompute_hit_tokens_total", cache.recompute_hit_tokens, tier=_TIER)
        metrics.count_to("prefix_cache_recompute_hit_tokens_total", cache.recompute_host_tokens, tier=_HOST)
