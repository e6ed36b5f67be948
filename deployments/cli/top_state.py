"""The values that `raydix top` shows: the document of `--json` and the rows of the screen.

    readings ──▶ Interval ──▶ TopView: service, models, replicas, decisions

None stands for an unknown value: not on the page, hidden, or a rate before there are two readings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deployments.cli.loose_json import number, objects, text
from deployments.cli.top_client import ServerReading
from deployments.config.versions import label_of
from deployments.telemetry.scrape import Interval, MetricsPage

GONE_SHOWN_S = 60.0
"""Seconds for which a replica that disappeared is still shown."""
WINDOW_S = 5.0
"""Seconds over which rates are computed if readings come faster. Processes report once a second, so over shorter
intervals a rate would alternate between 0 and twice its value."""


@dataclass(frozen=True, slots=True)
class ServiceSummary:
    """The application as a whole. Counts cover the interval."""

    status: str | None
    replicas_up: float | None
    replicas_expected: float | None
    admission_waiting_requests: float | None
    admission_waiting_tokens: float | None
    errors: float | None
    errors_by_status: dict[str, float]
    rejections: float | None
    rejections_by_reason: dict[str, float]
    decisions_by_reason: dict[str, float]
    retries: float | None
    migrations: float | None
    disconnects: float | None


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model. Quantiles and the hit rate cover the interval."""

    model: str
    status: str | None
    replicas_up: float | None
    replicas_expected: float | None
    running: float | None
    waiting: float | None
    requests_per_s: float | None
    prefill_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    hit_rate: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    session_share: float | None = None
    """Share of the model's sessions that this version gets, 0 to 1; None for a model without versions."""
    rollout: str | None = None
    """The state of this version's rollout; None where it has none."""


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One engine replica."""

    replica: str
    model: str | None
    state: str
    """ "up", "draining", "lost" (its heartbeats stopped), "gone" (disappeared recently), "unknown", or Serve's
    state if it is not up: "starting", "stopping", ..."""
    running: float | None
    waiting: float | None
    waiting_prefill_tokens: float | None
    kv_pages_free: float | None
    kv_pages_active: float | None
    kv_pages_cached: float | None
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    hit_rate: float | None
    preemptions: float | None
    """Preemptions in the interval."""
    evicted_pages_per_s: float | None
    heartbeat_age_s: float | None


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One of the router's last decisions."""

    at_unix_s: float | None
    request_id: str
    model: str
    replica: str
    reason: str
    prompt_tokens: float | None
    predicted_cached_tokens: float | None
    predicted_host_tokens: float | None
    """Those of them in host memory, which must be copied."""
    predicted_file_tokens: float | None
    """Those of them in files, which must be loaded."""
    found_cached_tokens: float | None
    cost_s: float | None


@dataclass(frozen=True, slots=True)
class TopView:
    """Everything that is shown at one moment."""

    url: str
    at_unix_s: float
    interval_s: float | None
    """Length of the interval. If None, counts and quantiles are since the processes' start, rates unknown."""
    service: ServiceSummary
    models: list[ModelRow] = field(default_factory=list)
    replicas: list[ReplicaRow] = field(default_factory=list)
    decisions: list[DecisionRow] | None = None
    """The newest is first; None while hidden."""
    hidden: dict[str, str] = field(default_factory=dict)
    """Parts that are not shown, with the reason."""

    def as_json(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        return asdict(self)


class ViewBuilder:
    """Turns readings into views. Remembers the last readings and replicas that disappeared."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._past: deque[ServerReading] = deque()
        self._seen: dict[str, tuple[ReplicaRow, float]] = {}

    def see(self, reading: ServerReading) -> TopView:
        """Return the view of this reading and an earlier one: the last that is `WINDOW_S` old, or the oldest."""
        while len(self._past) > 1 and reading.clock - self._past[1].clock >= WINDOW_S:
            self._past.popleft()
        before = self._past[0] if self._past else None
        self._past.append(reading)
        seconds = reading.clock - before.clock if before is not None else None
        interval = Interval(before.page if before is not None else None, reading.page, seconds)
        return TopView(
            url=self._url,
            at_unix_s=reading.at,
            interval_s=seconds,
            service=_service(reading.health, interval),
            models=[_model(name, reading, interval) for name in _model_names(reading)],
            replicas=self._with_gone(_replicas(reading, interval), reading),
            decisions=None if reading.decisions is None else list(map(_decision, objects(reading.decisions))),
            hidden=reading.hidden,
        )

    def _with_gone(self, present: list[ReplicaRow], reading: ServerReading) -> list[ReplicaRow]:
        """Return present replicas and those that disappeared recently; rows that need attention come first.

        A page includes a replica for some seconds after its end. A known replica that /health no longer lists is
        gone; one that was not known yet is starting.
        """
        is_listed = isinstance(reading.health.get("replicas"), list)
        lingering = {row.replica for row in present if row.state == "unknown"} & self._seen.keys()
        known = {row.replica: row for row in present if not (is_listed and row.replica in lingering)}
        self._seen |= {name: (row, reading.clock) for name, row in known.items()}
        shown_since = reading.clock - GONE_SHOWN_S
        self._seen = {name: seen for name, seen in self._seen.items() if seen[1] >= shown_since}
        gone = [_gone(row) for name, (row, _) in self._seen.items() if name not in known]
        return sorted([*known.values(), *gone], key=lambda row: (row.state == "up", row.model or "", row.replica))


def _service(health: Mapping[str, Any], interval: Interval) -> ServiceSummary:
    page = interval.after
    return ServiceSummary(
        status=text(health.get("status")),
        replicas_up=number(health.get("replicas_up")),
        replicas_expected=number(health.get("replicas_expected")),
        admission_waiting_requests=page.total("admission_waiting_requests"),
        admission_waiting_tokens=page.total("admission_waiting_tokens"),
        errors=interval.increase("request_errors_total"),
        errors_by_status=interval.by("request_errors_total", "status"),
        rejections=interval.increase("admission_rejections_total"),
        rejections_by_reason=interval.by("admission_rejections_total", "reason"),
        decisions_by_reason=interval.by("router_decisions_total", "reason"),
        retries=interval.increase("retries_total"),
        migrations=interval.increase("migrations_total"),
        disconnects=interval.increase("stream_disconnects_total"),
    )


def _model_names(reading: ServerReading) -> list[str]:
    healthy = reading.health.get("models")
    named = set(healthy) if isinstance(healthy, dict) else set()
    return sorted((named | reading.page.values("requests_running", "model_name")) - {""})


def _model(name: str, reading: ServerReading, interval: Interval) -> ModelRow:
    models = reading.health.get("models")
    said = models.get(name) if isinstance(models, dict) else None
    health: Mapping[str, Any] = said if isinstance(said, dict) else {}
    mine = {"model_name": name}
    return ModelRow(
        model=name,
        status=text(health.get("status")),
        replicas_up=number(health.get("replicas_up")),
        replicas_expected=number(health.get("replicas_expected")),
        running=reading.page.total("requests_running", **mine),
        waiting=reading.page.total("requests_waiting", **mine),
        requests_per_s=interval.rate("requests_total", **mine),
        prefill_tokens_per_s=interval.rate("prompt_tokens_total", source="computed", **mine),
        generated_tokens_per_s=interval.rate("generation_tokens_total", **mine),
        hit_rate=_hit_rate(interval, mine),
        ttft_p50_s=interval.quantile("time_to_first_token_seconds", 0.5, **mine),
        ttft_p99_s=interval.quantile("time_to_first_token_seconds", 0.99, **mine),
        itl_p50_s=interval.quantile("inter_token_latency_seconds", 0.5, **mine),
        itl_p99_s=interval.quantile("inter_token_latency_seconds", 0.99, **mine),
        session_share=next((share for share, _ in _of_version(name, reading.page, "version_weight")), None),
        rollout=next((state for is_it, state in _of_version(name, reading.page, "rollout_state") if is_it), None),
    )


def _of_version(name: str, page: MetricsPage, metric: str) -> Iterator[tuple[float, str | None]]:
    """Yield the values of a version's samples, with the label `state`."""
    for key, value in page.series(metric).items():
        labels = dict(key)
        if label_of(labels.get("model", ""), labels.get("version")) == name:
            yield value, labels.get("state")


def _replicas(reading: ServerReading, interval: Interval) -> list[ReplicaRow]:
    health = {row["replica"]: row for row in _named_replicas(reading.health)}
    serve: dict[str, tuple[str | None, Mapping[str, Any]]] = {}
    for one in objects((reading.status or {}).get("models")):
        serve |= {row["replica"]: (text(one.get("id")), row) for row in _named_replicas(one)}
    models = _models_of_replicas(reading.page)
    only = next(iter(names)) if len(names := _model_names(reading)) == 1 else None
    rows = []
    for name in sorted({*health, *serve, *models}):
        served_model, details = serve.get(name, (None, {}))
        model = models.get(name) or served_model or only
        rows.append(_replica(name, model, _state(health.get(name), details), health.get(name, {}), interval))
    return rows


def _models_of_replicas(page: MetricsPage) -> dict[str, str]:
    """Return the model of each reporting engine replica (one with KV pages), by its name."""
    labels = map(dict, page.series("kv_pages_capacity"))
    return {each["replica"]: each.get("model_name", "") for each in labels if "replica" in each}


def _state(health: Mapping[str, Any] | None, served: Mapping[str, Any]) -> str:
    if health is not None and health.get("is_draining") is True:
        return "draining"
    if health is not None and health.get("is_connected") is True:
        return "up"
    if served:
        state = (text(served.get("state")) or "unknown").lower()
        return "lost" if state == "running" else state
    return "unknown" if health is None else "lost"


def _replica(
    name: str, model: str | None, state: str, health: Mapping[str, Any], interval: Interval
) -> ReplicaRow:
    page, mine = interval.after, {"replica": name}
    running, waiting = number(health.get("num_running")), number(health.get("num_waiting"))
    return ReplicaRow(
        replica=name,
        model=model,
        state=state,
        # Heartbeats are more recent than the page.
        running=page.total("requests_running", **mine) if running is None else running,
        waiting=page.total("requests_waiting", **mine) if waiting is None else waiting,
        waiting_prefill_tokens=page.total("waiting_prefill_tokens", **mine),
        kv_pages_free=page.total("kv_pages", state="free", tier="device", **mine),
        kv_pages_active=page.total("kv_pages", state="active", tier="device", **mine),
        kv_pages_cached=page.total("kv_pages", state="cached", tier="device", **mine),
        prefill_tokens_per_s=interval.rate("prompt_tokens_total", source="computed", **mine),
        decode_tokens_per_s=interval.rate("generation_tokens_total", **mine),
        hit_rate=_hit_rate(interval, mine),
        preemptions=interval.increase("preemptions_total", **mine),
        evicted_pages_per_s=interval.rate("kv_evictions_total", tier="device", **mine),
        heartbeat_age_s=number(health.get("heartbeat_age_s")),
    )


def _gone(row: ReplicaRow) -> ReplicaRow:
    """Return the last known row without its activity."""
    return replace(
        row, state="gone", running=None, waiting=None, waiting_prefill_tokens=None, prefill_tokens_per_s=None,
        decode_tokens_per_s=None, hit_rate=None, preemptions=None, evicted_pages_per_s=None,
        kv_pages_free=None, kv_pages_active=None, kv_pages_cached=None, heartbeat_age_s=None,
    )  # fmt: skip


def _hit_rate(interval: Interval, labels: Mapping[str, str]) -> float | None:
    return interval.ratio("prefix_cache_hit_tokens_total", "prefix_cache_query_tokens_total", **labels)


def _decision(record: Mapping[str, Any]) -> DecisionRow:
    replica = text(record.get("replica")) or ""
    terms, tiers = record.get("terms"), record.get("predicted_tiers")
    chosen = terms.get(replica) if isinstance(terms, dict) else None
    return DecisionRow(
        at_unix_s=number(record.get("at")),
        request_id=text(record.get("request_id")) or "",
        model=text(record.get("model")) or "",
        replica=replica,
        reason=text(record.get("reason")) or "",
        prompt_tokens=number(record.get("num_tokens")),
        predicted_cached_tokens=number(record.get("predicted_cached")),
        predicted_host_tokens=number(tiers.get("host")) if isinstance(tiers, dict) else None,
        predicted_file_tokens=number(tiers.get("file")) if isinstance(tiers, dict) else None,
        found_cached_tokens=number(record.get("actual_cached")),
        cost_s=number(chosen.get("total")) if isinstance(chosen, dict) else None,
    )


def _named_replicas(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return (row for row in objects(value.get("replicas")) if isinstance(row.get("replica"), str))
