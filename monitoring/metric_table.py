"""The table of all metrics.

Every series carries `model_name`; counters and gauges also `replica`. Histograms are merged over replicas, because
thirty buckets for every replica would make scrapes slow. Labels never hold clients' data: closed labels list
their values here and start at 0; the code that fills open ones (None) bounds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PREFIX = "raydix_"

Kind = Literal["counter", "gauge", "histogram"]
Part = Literal["engine", "ingress", "hub"]
Key = tuple[str, ...]
"""Label values in the order of the definition."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One definition; `METRICS` holds them all."""

    name: str
    """Without the prefix; counters end in `_total`, seconds in `_seconds`."""
    kind: Kind
    help: str
    unit: str
    part: Part | None = None
    """The part of the application that counts it; its processes show it from the start. None: no part does."""
    labels: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    """Possible values of each label; None: any value that our own code chooses."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without infinity."""
    is_seeded: bool = True
    """Whether it is shown at 0 before anything happened; False where 0 might be wrong."""

    def initial_keys(self) -> list[Key]:
        """Return the series that exist before anything happened: all of them when every label is closed."""
        if not self.is_seeded:
            return []
        values = [choices for choices in self.labels.values() if choices is not None]
        return list(itertools.product(*values)) if len(values) == len(self.labels) else []


# fmt: off
_LATENCY = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0,
            500.0)
_TOKEN_LATENCY = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5,
                  1.0, 2.0, 5.0, 10.0)
# Pages live from milliseconds, under pressure, to hours.
_AGES = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)
_DECISION = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_PAUSES = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_REQUESTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_REQUEST_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5,
                   5e5, 1e6)
_REASON = ("holder", "cheaper", "cold", "session", "hash", "spill", "load", "random", "rule", "only_one",
           "none_available")
# fmt: on

_ENDPOINT = ("completions", "chat_completions", "messages", "responses", "embeddings", "rerank", "score")
_LOSS = ("died", "silent", "failed", "step_failed", "drained", "handed_over")
_PHASE = ("prefill", "decode", "mixed")
_STAGE = ("schedule", "prepare", "forward", "sample", "output")
_TIER = ("device",)
_TIERS = ("device", "host")
_MOVED = ("host", "file", "peer")
_METHOD = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "other")


def _gauge(name: str, help: str, unit: str, **labels: tuple[str, ...] | None) -> Metric:
    return Metric(name, "gauge", help, unit, "engine", labels)


def _counter(name: str, part: Part, help: str, unit: str, **labels: tuple[str, ...] | None) -> Metric:
    return Metric(name, "counter", help, unit, part, labels)


def _histogram(
    name: str, part: Part, help: str, unit: str, buckets: tuple[float, ...], **labels: tuple[str, ...] | None
) -> Metric:
    return Metric(name, "histogram", help, unit, part, labels, buckets)


# fmt: off
METRICS: tuple[Metric, ...] = (
    _gauge("requests_running", "Requests in the running batch.", "requests"),
    # deferred: it waits for another request, which computes its first pages
    _gauge("requests_waiting", "Requests waiting for admission to the batch, by reason.", "requests",
           reason=("capacity", "deferred")),
    _gauge("queue_oldest_age_seconds", "How long the oldest waiting request has waited.", "seconds"),
    _gauge("waiting_prefill_tokens", "Prompt tokens still to compute, of waiting and running requests.", "tokens"),
    _counter("requests_total", "ingress", "Finished requests.", "requests",
             endpoint=_ENDPOINT, streaming=("true", "false"),
             finish_reason=("stop", "length", "tool_calls", "abort", "error")),
    _counter("request_errors_total", "ingress", "Requests answered with an error.", "requests",
             endpoint=(*_ENDPOINT, "other"), status=None, error_type=None),
    _counter("admission_rejections_total", "ingress", "Requests refused before any work was done.", "requests",
             reason=("queue_full", "unavailable", "tenant_queue_full", "deadline", "requests_per_minute",
                     "tokens_per_minute", "max_concurrency", "unauthenticated")),
    Metric("admission_waiting_requests", "gauge", "Requests that wait in the ingress for an engine.", "requests",
           "ingress"),
    # Resources that an ingress holds for its clients: all are 0 again when the clients have gone.
    Metric("open_streams", "gauge", "Requests to engines that have not ended; each has a journal.", "requests",
           "ingress"),
    Metric("http_connections", "gauge", "Open connections of clients.", "connections", "ingress"),
    Metric("admission_waiting_tokens", "gauge", "Uncached prompt tokens of requests that wait in the ingress.",
           "tokens", "ingress"),
    # `tenant` is a name from the configuration, never a client's text.
    _counter("tenant_requests_total", "ingress", "Requests to generate, by tenant.", "requests", tenant=None),
    _counter("tenant_tokens_total", "ingress", "Tokens by tenant, counted as its limits count them.", "tokens",
             tenant=None, kind=("prompt", "generated")),
    Metric("tenant_generations", "gauge", "Generations of a tenant that have not ended: max_concurrency.",
           "generations", "ingress", {"tenant": None}),
    _counter("tenant_rejections_total", "ingress", "Requests refused before any work was done, by tenant.",
             "requests", tenant=None, reason=None),
    _histogram("tenant_queue_seconds", "ingress", "Wait in the ingress for an engine, by tenant.", "seconds",
               _LATENCY, tenant=None),
    _histogram("time_to_first_token_seconds", "ingress", "From a request's arrival to its first token.", "seconds",
               _LATENCY),
    _histogram("inter_token_latency_seconds", "ingress", "Between one token of a request and the next.", "seconds",
               _TOKEN_LATENCY),
    _histogram("time_per_output_token_seconds", "ingress",
               "Mean time between tokens of an answer, from its first to its last.", "seconds", _TOKEN_LATENCY),
    _histogram("request_duration_seconds", "ingress", "From a request's arrival to its end.", "seconds", _LATENCY),
    # Targets are the settings `slo`; a request without a measurement (one token has no itl) counts nowhere.
    _counter("slo_requests_total", "ingress", "Requests by whether they met a target of the settings.", "requests",
             slo=("ttft", "itl", "e2e"), met=("true", "false")),
    _histogram("request_prompt_tokens", "ingress", "Prompt tokens of a request.", "tokens", _REQUEST_TOKENS),
    _histogram("request_output_tokens", "ingress", "Generated tokens of a request.", "tokens", _REQUEST_TOKENS),
    _histogram("request_queue_seconds", "engine", "From arrival in the engine to admission.", "seconds", _LATENCY),
    _histogram("request_prefill_seconds", "engine", "From admission to the first token.", "seconds", _LATENCY),
    _histogram("request_decode_seconds", "engine", "From the first token to the last.", "seconds", _LATENCY),
    _counter("prompt_tokens_total", "engine",
             "Prompt tokens: computed, found on the device or copied from host memory.", "tokens",
             source=("computed", "device", "host")),
    _counter("generation_tokens_total", "engine", "Generated tokens.", "tokens"),
    _counter("spec_draft_tokens_total", "engine", "Draft tokens that the model verified.", "tokens"),
    _counter("spec_accepted_tokens_total", "engine", "Draft tokens that the model accepted.", "tokens"),
    _counter("conversation_characters_total", "ingress",
             "Characters of conversations: tokenized, or kept with their token ids from an earlier request.",
             "characters", source=("tokenized", "kept")),
    _counter("reasoning_tokens_total", "ingress", "Generated tokens that were reasoning.", "tokens"),
    _counter("prefix_cache_query_tokens_total", "engine", "Prompt tokens looked up in the cache.", "tokens"),
    _counter("prefix_cache_hit_tokens_total", "engine", "Looked-up tokens whose KV was there.", "tokens",
             tier=_TIERS),
    _counter("prefix_cache_recompute_query_tokens_total", "engine",
             "Tokens looked up when a preempted request was resumed.", "tokens"),
    _counter("prefix_cache_recompute_hit_tokens_total", "engine",
             "Tokens found when a preempted request was resumed.", "tokens", tier=_TIERS),
    # Host memory holds the KV that preempted requests had computed (active), and evicted prefixes (cached), with
    # the recurrent states after them. Engines that share files each count all of them.
    _gauge("kv_pages", "KV pages by state; active ones belong to requests, cached ones can be evicted.", "pages",
           state=("free", "active", "cached"), tier=(*_TIERS, "file")),
    # Not kv_pages_total: Prometheus keeps that suffix for counters.
    _gauge("kv_pages_capacity", "All KV pages.", "pages", tier=_TIERS),
    _gauge("state_slots", "Slots for recurrent states: of running requests, and snapshots at ends of prefixes.",
           "slots", state=("free", "running", "snapshot")),
    _gauge("kv_page_size_tokens", "Tokens that fit in a KV page.", "tokens"),
    _counter("kv_evictions_total", "engine", "KV pages evicted from the prefix cache.", "pages", tier=_TIERS,
             reason=("capacity", "reset")),
    # out: from the device to host memory, from there to files, to a replica that fetches them; in: the reverse.
    _counter("kv_transfer_pages_total", "engine", "KV pages copied to another memory or replica, and from it.",
             "pages", tier=_MOVED, direction=("out", "in")),
    _counter("kv_transfer_bytes_total", "engine",
             "Bytes of KV pages copied to or from another memory or replica, by an engine's first rank.", "bytes",
             tier=_MOVED, direction=("out", "in")),
    _counter("kv_transfer_failed_pages_total", "engine",
             "KV pages that did not arrive, or arrived damaged; their tokens were computed.", "pages",
             tier=("file", "peer")),
    # It falls where copies took longer than computing would have; those of preempted requests count too.
    _gauge("kv_saved_seconds",
           "Seconds of prefill saved since the start by KV from host memory or files, minus copies.", "seconds",
           tier=("host",)),
    _histogram("kv_page_lifetime_seconds", "engine", "From allocating to evicting a KV page, of sampled pages.",
               "seconds", _AGES),
    _histogram("kv_page_idle_before_evict_seconds", "engine",
               "From the last use of a KV page to its eviction, of sampled pages.", "seconds", _AGES),
    _counter("preemptions_total", "engine", "Requests put back in the queue for lack of KV pages.", "events",
             mode=("recompute", "swap")),
    _histogram("engine_step_seconds", "engine", "Duration of an engine step.", "seconds", _TOKEN_LATENCY,
               phase=_PHASE),
    _histogram("engine_batch_requests", "engine", "Requests in a step.", "requests", _REQUESTS, phase=_PHASE),
    _histogram("engine_batch_tokens", "engine", "Tokens computed in a step.", "tokens", _TOKENS, phase=_PHASE),
    _counter("engine_stage_seconds_total", "engine", "Time the engine loop spent in each stage.", "seconds",
             stage=_STAGE),
    _counter("engine_steps_total", "engine", "Steps that the engine has run.", "steps"),
    # memory: the step got none; device: it can no longer compute
    _counter("engine_failed_steps_total", "engine",
             "Steps that failed, and failed self-tests after them, by cause.", "steps",
             cause=("memory", "device", "other")),
    _counter("engine_graph_replays_total", "engine",
             "Steps by how they were launched: as a recorded graph or operator by operator.", "steps",
             mode=("graph", "eager")),
    _gauge("engine_up", "1 while the engine's loop runs; summed, the engine replicas that serve.", "replicas"),
    Metric("gpu_utilization_ratio", "gauge", "Share of the time in which the GPU was busy, 0 to 1.", "ratio",
           "engine", is_seeded=False),
    # With engine.expert_parallel; in a pipeline, of the first stage's layers.
    Metric("engine_expert_imbalance_ratio", "gauge",
           "Tokens of the busiest of the GPUs that share experts over the GPUs' mean, averaged over layers.",
           "ratio", "engine", is_seeded=False),
    _counter("warm_up_prefixes_total", "engine", "Prefixes computed before the first request.", "prefixes"),
    _counter("warm_up_tokens_total", "engine", "Tokens of prefixes computed before the first request.", "tokens"),
    _counter("warm_up_seconds_total", "engine", "Time spent computing prefixes in the warm-up.", "seconds"),
    # policy="custom" stands for "package.module:Class".
    _counter("router_decisions_total", "ingress", "Requests placed, by policy and reason.", "requests",
             policy=("cost", "session", "least_loaded", "rendezvous", "random", "custom"), reason=_REASON),
    _histogram("router_decision_seconds", "ingress", "Time to choose a request's replica.", "seconds", _DECISION),
    Metric("router_index_lag_seconds", "gauge",
           "Age of the oldest last report of a connected replica's cache.", "seconds",
           "ingress"),
    Metric("router_open_requests", "gauge", "Requests that the router counts at a replica, or on the way there.",
           "requests", "ingress"),
    Metric("router_replicas", "gauge", "Engine replicas as the router sees them.", "replicas", "ingress",
           {"state": ("available", "draining", "lost", "failing", "circuit_open")}),
    Metric("replicas_expected", "gauge", "Engine replicas that the configuration asks for.", "replicas",
           "ingress"),
    _counter("router_errors_total", "ingress", "Requests for which the policy failed; sent to the least loaded.",
             "requests"),
    _counter("router_regret_tokens_total", "ingress",
             "Prompt tokens that another available replica had cached and the chosen one had not.", "tokens"),
    _counter("router_hit_tokens_total", "ingress", "Cached prompt tokens, predicted by the router and actual.",
             "tokens", kind=("predicted", "actual")),
    Metric("router_index_blocks", "gauge", "Blocks of prefixes that the router knows of.", "blocks", "ingress"),
    Metric("router_index_capacity_blocks", "gauge", "Blocks that fit into the router's index.", "blocks",
           "ingress"),
    _counter("router_index_dropped_blocks_total", "ingress",
             "Blocks forgotten or not stored because the index was full.", "blocks"),
    _gauge("wire_kept_requests",
           "Requests whose output is kept for an ingress: unfinished ones, and those that ended seconds ago.",
           "requests"),
    _gauge("detached_requests", "Requests of resumable streams without a reader, also those that have ended.",
           "requests"),
    _gauge("detached_bytes", "Size of output and records of the requests in detached_requests.", "bytes"),
    _gauge("wire_ingresses", "Ingresses that are connected.", "ingresses"),
    _counter("wire_rejected_messages_total", "engine", "Messages of ingresses that were rejected.", "messages",
             kind=("malformed", "unauthenticated", "refused", "replayed", "congested", "failed", "handshake",
                   "endless")),
    _counter("kv_event_blocks_total", "engine", "KV blocks announced to other systems' routers.", "blocks",
             event=("stored", "removed")),
    _counter("kv_event_replays_total", "engine",
             "Requests for missed KV events, by the answer: kept events, all held blocks, or neither.",
             "requests", outcome=("buffered", "snapshot", "malformed", "broken_off")),
    _counter("wire_dropped_messages_total", "ingress", "Messages of replicas that were dropped, and gaps.",
             "messages", kind=("malformed", "refused", "epoch", "replayed", "gaps", "congested", "renewed")),
    _counter("notices_total", "engine", "Announcements that the machine of a replica ends.", "notices",
             source=("file", "url", "aws", "gcp", "azure")),
    _counter("handed_over_tokens_total", "ingress",
             "Tokens whose KV others received from a replica that leaves, and did not have to compute.", "tokens",
             kind=("stream", "prefix")),
    _counter("migrations_total", "ingress", "Streams that lost their replica after the first token.", "streams",
             reason=_LOSS, outcome=("resumed", "gave_up", "no_replica")),
    _histogram("migration_gap_seconds", "ingress", "Pause of a stream that moved to another replica.", "seconds",
               _LATENCY),
    _counter("suspects_total", "ingress", "Requests whose replica died: cleared elsewhere, or ended as the cause.",
             "requests", outcome=("cleared", "ended")),
    _counter("retries_total", "ingress", "Requests whose replica was lost before the first token, sent elsewhere.",
             "requests", reason=_LOSS),
    _counter("hedges_total", "ingress", "Requests that were slow to begin and therefore sent twice.",
             "requests", outcome=("won", "lost", "over_budget")),
    _counter("grammar_requests_total", "ingress",
             "Requests whose answer must match a grammar: known usable, checked usable, unusable, too complex.",
             "requests", result=("hit", "miss", "rejected", "timeout")),
    _histogram("grammar_compile_seconds", "ingress", "Time to check whether a grammar can be used.", "seconds",
               _LATENCY),
    _gauge("grammar_cache_bytes", "Bytes counted for compiled grammars that are kept for reuse.", "bytes"),
    _counter("grammar_cache_requests_total", "engine",
             "Requests whose answer must match a grammar: it was compiled already, or had to be.", "requests",
             result=("hit", "miss")),
    _counter("stream_disconnects_total", "ingress", "Streams whose client left before the end.", "streams"),
    _counter("stream_resumptions_total", "ingress",
             "Requests to continue a stream: from a replica that has it, by generating it again, or refused.",
             "requests", outcome=("adopted", "regenerated", "refused")),
    # `route` is one of our own templates, never the path of a request.
    _counter("http_requests_total", "ingress", "HTTP requests answered; status 499: the client left first.",
             "requests", route=None, method=_METHOD, status=None),
    Metric("http_inflight_requests", "gauge", "HTTP requests being answered, including streams.", "requests",
           "ingress"),
    Metric("ingress_loop_lag_seconds", "gauge",
           "Longest delay of an ingress's event loop in the last minute, for which its streams waited.",
           "seconds", "ingress"),
    Metric("ingress_loop_own_lag_seconds", "gauge",
           "The part of ingress_loop_lag_seconds in which the ingress computed, not waited for a processor.",
           "seconds", "ingress"),
    # Of engines and ingresses. 0: collections of young objects only; 2: full ones.
    Metric("gc_pause_seconds", "histogram", "Pause of a process for a garbage collection, by generation.",
           "seconds", None, {"generation": ("0", "1", "2")}, _PAUSES),
    Metric("build_info", "gauge", "1; the labels say what runs.", "", None,
           {"version": None, "attention": None, "device": None, "dtype": None}),
    Metric("refuses_settings", "gauge",
           "1 while a process keeps its settings because new ones are wrong.", "processes", None),
    # `model` and `version` are names from the configuration.
    Metric("version_weight", "gauge", "Share of a model's sessions that a version gets, 0 to 1.", "ratio", "hub",
           {"model": None, "version": None}),
    Metric("rollout_state", "gauge", "1 for the present state of a version's rollout, 0 for others.", "rollouts",
           "hub", {"model": None, "version": None,
                   "state": ("waiting", "running", "paused", "done", "rolled_back", "aborted")}),
    Metric("metrics_processes", "gauge", "Processes whose numbers are recent.", "processes", "hub"),
    _counter("metrics_snapshots_dropped_total", "hub", "Reports of processes that could not be used.", "snapshots",
             reason=("malformed", "too_large", "too_many", "out_of_order")),
)
# fmt: on

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
