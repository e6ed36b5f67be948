"""The metrics: one table of definitions, and one process's values.

Every series bears `model_name`; counters and gauges also `replica`. Histograms are merged over replicas: thirty
buckets times every replica is what makes scrapes slow. Labels never hold what a client sent: closed ones list
their values here and start at 0, open ones (None) are bounded by the code that fills them.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

PREFIX = "raydix_"
SNAPSHOT_VERSION = 1
MAX_SERIES = 256
"""Most label combinations of one metric in one process; more are counted under the label value "overflow"."""

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
    """Label to its possible values; None: any value that our own code chooses."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without infinity."""
    is_seeded: bool = True
    """Whether it shows at 0 before anything happened; False where 0 might be wrong."""

    def initial_keys(self) -> list[Key]:
        """The series that exist before anything happened: all of them when every label is closed."""
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
_LOSS = ("died", "silent", "failed", "drained", "handed_over")
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
    # deferred: waits for another request, which computes the page it begins with
    _gauge("requests_waiting", "Requests waiting for admission to the batch, by what they wait for.", "requests",
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
    # What an ingress holds for its clients: all of it is 0 again when they have gone.
    Metric("open_streams", "gauge", "Requests to engines that have not ended; each has a journal.", "requests",
           "ingress"),
    Metric("http_connections", "gauge", "Open connections of clients.", "connections", "ingress"),
    Metric("admission_waiting_tokens", "gauge", "Uncached prompt tokens of those requests.", "tokens", "ingress"),
    # `tenant` is a name from the configuration, never what a client sent.
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
    # Targets are the settings `slo`; a request that was not measured (one token has no itl) counts nowhere.
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
             "Characters of conversations: tokenized, or kept with their token ids from a request before.",
             "characters", source=("tokenized", "kept")),
    _counter("reasoning_tokens_total", "ingress", "Generated tokens that were reasoning.", "tokens"),
    _counter("prefix_cache_query_tokens_total", "engine", "Prompt tokens looked up in the cache.", "tokens"),
    _counter("prefix_cache_hit_tokens_total", "engine", "Looked-up tokens whose KV was there.", "tokens",
             tier=_TIERS),
    _counter("prefix_cache_recompute_query_tokens_total", "engine",
             "Tokens looked up when a preempted request was resumed.", "tokens"),
    _counter("prefix_cache_recompute_hit_tokens_total", "engine",
             "Tokens found when a preempted request was resumed.", "tokens", tier=_TIERS),
    # In host memory lies what preempted requests had computed (active), and evicted prefixes (cached), with the
    # recurrent states after them. Of files that several engines share, each counts all that it sees.
    _gauge("kv_pages", "KV pages by state; active ones belong to requests, cached ones can be evicted.", "pages",
           state=("free", "active", "cached"), tier=(*_TIERS, "file")),
    # Not kv_pages_total: Prometheus keeps that suffix for counters.
    _gauge("kv_pages_capacity", "KV pages there are.", "pages", tier=_TIERS),
    _gauge("state_slots", "Slots for recurrent states: of running requests, and snapshots at ends of prefixes.",
           "slots", state=("free", "running", "snapshot")),
    _gauge("kv_page_size_tokens", "Tokens that fit in a KV page.", "tokens"),
    _counter("kv_evictions_total", "engine", "KV pages evicted from the prefix cache.", "pages", tier=_TIERS,
             reason=("capacity", "reset")),
    # out: from the device to host memory, from there to files, to a replica that fetches them; in: the reverse.
    _counter("kv_transfer_pages_total", "engine", "KV pages copied to another memory or replica, and from it.",
             "pages", tier=_MOVED, direction=("out", "in")),
    _counter("kv_transfer_bytes_total", "engine", "Bytes of these pages, of an engine's first rank.", "bytes",
             tier=_MOVED, direction=("out", "in")),
    _counter("kv_transfer_failed_pages_total", "engine",
             "KV pages that did not come, or not as they were written; their tokens were computed.", "pages",
             tier=("file", "peer")),
    # It falls where copies took longer than computing would have; a preempted request's are counted too.
    _gauge("kv_saved_seconds", "Prefill that KV from below the device has saved since the start, less its copies.",
           "seconds", tier=("host",)),
    _histogram("kv_page_lifetime_seconds", "engine", "From taking a KV page to its eviction, of sampled pages.",
               "seconds", _AGES),
    _histogram("kv_page_idle_before_evict_seconds", "engine",
               "From the last use of a KV page to its eviction, of sampled pages.", "seconds", _AGES),
    _counter("preemptions_total", "engine", "Requests put back in the queue for want of KV pages.", "events",
             mode=("recompute", "swap")),
    _histogram("engine_step_seconds", "engine", "Duration of an engine step.", "seconds", _TOKEN_LATENCY,
               phase=_PHASE),
    _histogram("engine_batch_requests", "engine", "Requests in a step.", "requests", _REQUESTS, phase=_PHASE),
    _histogram("engine_batch_tokens", "engine", "Tokens computed in a step.", "tokens", _TOKENS, phase=_PHASE),
    _counter("engine_stage_seconds_total", "engine", "Time the engine loop spent in each stage.", "seconds",
             stage=_STAGE),
    _counter("engine_steps_total", "engine", "Steps the engine has run.", "steps"),
    _counter("engine_graph_replays_total", "engine",
             "Steps by how they were launched: as a recorded graph or operator by operator.", "steps",
             mode=("graph", "eager")),
    _gauge("engine_up", "1 while the engine's loop lives; summed, the engine replicas that serve.", "replicas"),
    Metric("gpu_utilization_ratio", "gauge", "Share of the time in which the GPU was busy, 0 to 1.", "ratio",
           "engine", is_seeded=False),
    _counter("warm_up_prefixes_total", "engine", "Prefixes computed before the first request.", "prefixes"),
    _counter("warm_up_tokens_total", "engine", "Tokens of prefixes computed before the first request.", "tokens"),
    _counter("warm_up_seconds_total", "engine", "Time spent computing prefixes in the warm-up.", "seconds"),
    # policy="custom" stands for "package.module:Class".
    _counter("router_decisions_total", "ingress", "Requests placed, by policy and reason.", "requests",
             policy=("cost", "session", "least_loaded", "rendezvous", "random", "custom"), reason=_REASON),
    _histogram("router_decision_seconds", "ingress", "Time to decide where a request goes.", "seconds", _DECISION),
    Metric("router_index_lag_seconds", "gauge",
           "Age of the oldest news of a connected replica's cache: what the router does not know yet.", "seconds",
           "ingress"),
    Metric("router_open_requests", "gauge", "Requests that the router counts at a replica, or on the way there.",
           "requests", "ingress"),
    Metric("router_replicas", "gauge", "Engine replicas as the router sees them.", "replicas", "ingress",
           {"state": ("available", "draining", "lost", "circuit_open")}),
    Metric("replicas_expected", "gauge", "Engine replicas that the configuration asks for.", "replicas",
           "ingress"),
    _counter("router_errors_total", "ingress", "Requests for which the policy failed; sent to the least loaded.",
             "requests"),
    _counter("router_regret_tokens_total", "ingress",
             "Prompt tokens that another available replica had cached and the chosen one had not.", "tokens"),
    _counter("router_hit_tokens_total", "ingress", "Cached prompt tokens, as the router predicted and as it was.",
             "tokens", kind=("predicted", "actual")),
    Metric("router_index_blocks", "gauge", "Blocks of prefixes that the router knows of.", "blocks", "ingress"),
    Metric("router_index_capacity_blocks", "gauge", "Blocks for which the router's index has room.", "blocks",
           "ingress"),
    _counter("router_index_dropped_blocks_total", "ingress",
             "Blocks forgotten or not taken in because the index was full.", "blocks"),
    _gauge("wire_kept_requests",
           "Requests whose output is kept for an ingress: unfinished ones, and those that ended seconds ago.",
           "requests"),
    _gauge("wire_ingresses", "Ingresses that are connected.", "ingresses"),
    _counter("wire_rejected_messages_total", "engine", "Messages of ingresses that were not taken in.", "messages",
             kind=("malformed", "unauthenticated", "refused", "replayed", "congested", "failed", "handshake",
                   "endless")),
    _counter("kv_event_blocks_total", "engine", "Blocks of KV that routers of others were told of.", "blocks",
             event=("stored", "removed")),
    _counter("kv_event_replays_total", "engine",
             "Requests for events that were missed: kept ones were sent, or all that is held, or neither.",
             "requests", outcome=("buffered", "snapshot", "malformed", "broken_off")),
    _counter("wire_dropped_messages_total", "ingress", "Messages of replicas that were not taken in, and gaps.",
             "messages", kind=("malformed", "refused", "epoch", "replayed", "gaps", "congested", "renewed")),
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
             "Requests whose answer must match a grammar: known to be usable, found to be, not so, too complex.",
             "requests", result=("hit", "miss", "rejected", "timeout")),
    _histogram("grammar_compile_seconds", "ingress", "Time to find out whether a grammar can be used.", "seconds",
               _LATENCY),
    _gauge("grammar_cache_bytes", "Bytes that the compiled grammars kept for requests to come count.", "bytes"),
    _counter("grammar_cache_requests_total", "engine",
             "Requests whose answer must match a grammar: it was there, or had to be compiled.", "requests",
             result=("hit", "miss")),
    _counter("stream_disconnects_total", "ingress", "Streams whose client left before the end.", "streams"),
    # `route` is a template of our own, never the path that was asked for.
    _counter("http_requests_total", "ingress", "HTTP requests answered; status 499: the client left first.",
             "requests", route=None, method=_METHOD, status=None),
    Metric("http_inflight_requests", "gauge", "HTTP requests being answered, streams included.", "requests",
           "ingress"),
    Metric("ingress_loop_lag_seconds", "gauge",
           "Longest delay of an ingress's event loop in the last minute, for which its streams waited.",
           "seconds", "ingress"),
    Metric("ingress_loop_own_lag_seconds", "gauge",
           "The same as far as the ingress computed meanwhile; the rest is the machine's, which ran others.",
           "seconds", "ingress"),
    # Of engines and ingresses. 0 are collections of young objects alone, 2 are full ones.
    Metric("gc_pause_seconds", "histogram", "Pause of a process for a garbage collection, by generation.",
           "seconds", None, {"generation": ("0", "1", "2")}, _PAUSES),
    Metric("build_info", "gauge", "1; the labels say what runs.", "", None,
           {"version": None, "attention": None, "device": None, "dtype": None}),
    Metric("metrics_processes", "gauge", "Processes whose numbers are recent.", "processes", "hub"),
    _counter("metrics_snapshots_dropped_total", "hub", "Reports of processes that could not be used.", "snapshots",
             reason=("malformed", "too_large", "too_many", "out_of_order")),
)
# fmt: on

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


class Histogram(msgspec.Struct, array_like=True):
    """Observations by bucket, not cumulative; the last count is of those above all bounds."""

    counts: list[int]
    sum: float = 0.0


class Snapshot(msgspec.Struct):
    """One process's values at one moment, as they travel to the hub."""

    version: int
    epoch: str
    """New with every start of a process, whose counters begin at 0. Later epochs sort after earlier ones."""
    sequence: int
    """Grows with every snapshot of an epoch."""
    model_name: str
    replica: str
    values: dict[str, list[tuple[Key, float]]]
    """Counters and gauges by name: (label values, value)."""
    histograms: dict[str, list[tuple[Key, Histogram]]]

    @property
    def moment(self) -> tuple[str, int]:
        """Key that orders the snapshots of one process."""
        return self.epoch, self.sequence


class Counter:
    """One series of a counter, looked up once. Callable from any thread."""

    def __init__(self, series: dict[Key, float], key: Key, lock: threading.Lock) -> None:
        self._series, self._key, self._lock = series, key, lock

    def inc(self, value: float = 1.0) -> None:
        """Add to the counter. The value must not be negative."""
        with self._lock:
            self._series[self._key] = self._series.get(self._key, 0.0) + value


class Gauge:
    """One series of a gauge, looked up once. Callable from any thread."""

    def __init__(self, series: dict[Key, float], key: Key, lock: threading.Lock) -> None:
        self._series, self._key, self._lock = series, key, lock

    def set(self, value: float) -> None:
        """Set the gauge."""
        with self._lock:
            self._series[self._key] = value


class Series:
    """One series of a histogram, looked up once. Callable from any thread."""

    def __init__(self, histogram: Histogram, buckets: tuple[float, ...], lock: threading.Lock) -> None:
        self._histogram, self._buckets, self._lock = histogram, buckets, lock

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of the same value."""
        histogram, bucket = self._histogram, bisect_left(self._buckets, value)
        with self._lock:
            histogram.counts[bucket] += count
            histogram.sum += value * count


class Metrics:
    """One process's values. Cheap enough for every engine step; callable from any thread.

    A name, a label or a label's value that is not in the table is a programming error and raises
    KeyError or ValueError.
    """

    def __init__(self, model_name: str, replica: str, part: Part | None = None) -> None:
        """`part` says which metrics show from the start, at 0; None takes all."""
        self.model_name = model_name
        self.replica = replica
        self._epoch = f"{time.time_ns():020}-{uuid.uuid4().hex}"
        self._sequence = 0
        self._lock = threading.Lock()
        self._values: dict[str, dict[Key, float]] = {}
        self._histograms: dict[str, dict[Key, Histogram]] = {}
        # Keys of series that exist, by the arguments of the calls that named them: checking those takes longest.
        self._known: dict[tuple[object, ...], Key] = {}
        for metric in METRICS:
            keys = metric.initial_keys() if part is None or metric.part == part else []
            if metric.kind == "histogram":
                self._histograms[metric.name] = {key: _empty(metric) for key in keys}
            else:
                self._values[metric.name] = dict.fromkeys(keys, 0.0)

    def inc(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        if not value >= 0:
            raise ValueError(f"the counter {name} can only grow, got inc({value})")
        with self._lock:
            key = self._key(name, "counter", labels)
            series = self._values[name]
            series[key] = series.get(key, 0.0) + value

    def counter(self, name: str, **labels: str) -> Counter:
        """Return a series of a counter, for those who count often: looking it up takes most of the time."""
        with self._lock:
            key = self._key(name, "counter", labels)
            return Counter(self._values[name], key, self._lock)

    def count_to(self, name: str, total: float, **labels: str) -> None:
        """Raise a counter to a total that is kept elsewhere; a smaller total than before changes nothing."""
        with self._lock:
            key = self._key(name, "counter", labels)
            series = self._values[name]
            series[key] = max(series.get(key, 0.0), total)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name][self._key(name, "gauge", labels)] = value

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Return a series of a gauge, for those who set it often."""
        with self._lock:
            return Gauge(self._values[name], self._key(name, "gauge", labels), self._lock)

    def observe(self, name: str, value: float, count: int = 1, **labels: str) -> None:
        """Add `count` observations of the same value to a histogram."""
        self.series(name, **labels).observe(value, count)

    def series(self, name: str, **labels: str) -> Series:
        """Return a series of a histogram, for those who observe it often: looking it up takes most of the time."""
        with self._lock:
            key = self._key(name, "histogram", labels)
            histogram = self._histograms[name].get(key)
            if histogram is None:
                histogram = self._histograms[name].setdefault(key, _empty(BY_NAME[name]))
        return Series(histogram, BY_NAME[name].buckets, self._lock)

    def snapshot(self) -> bytes:
        """All values as msgpack: what `Hub.push` takes."""
        with self._lock:
            self._sequence += 1
            return msgspec.msgpack.encode(
                Snapshot(
                    SNAPSHOT_VERSION,
                    self._epoch,
                    self._sequence,
                    self.model_name,
                    self.replica,
                    {name: list(series.items()) for name, series in self._values.items() if series},
                    {name: list(series.items()) for name, series in self._histograms.items() if series},
                )
            )

    def _key(self, name: str, kind: Kind, labels: Mapping[str, str]) -> Key:
        call = (name, kind, *labels.items())
        known = self._known.get(call)
        if known is not None:
            return known
        metric = BY_NAME.get(name)
        if metric is None:
            raise KeyError(f"no metric is named {name!r}; monitoring/metrics.py has the table of all")
        if metric.kind != kind:
            raise ValueError(f"{name} is a {metric.kind}, but was used as a {kind}")
        series: Mapping[Key, object] = self._histograms[name] if kind == "histogram" else self._values[name]
        try:
            key = tuple([labels[label] for label in metric.labels])
        except KeyError as missing:
            raise ValueError(f"{name} has the labels {sorted(metric.labels)}, {missing} is missing") from None
        if key in series and len(labels) == len(key):
            self._known[call] = key
            return key
        _check_labels(metric, labels)
        if len(series) >= MAX_SERIES:
            return tuple("overflow" if choices is None else labels[k] for k, choices in metric.labels.items())
        return key


def _check_labels(metric: Metric, labels: Mapping[str, str]) -> None:
    unknown = labels.keys() - metric.labels.keys()
    if unknown:
        raise ValueError(f"{metric.name} has the labels {sorted(metric.labels)}, not {sorted(unknown)}")
    for label, choices in metric.labels.items():
        value = labels[label]
        if not isinstance(value, str) or (choices is not None and value not in choices):
            expected: Sequence[str] | str = choices if choices is not None else "a string"
            raise ValueError(f"{metric.name}: {label} must be one of {expected}, got {value!r}")


def _empty(metric: Metric) -> Histogram:
    return Histogram([0] * (len(metric.buckets) + 1))
