"""The hub: the latest numbers of every process, summed into one page for Prometheus.

process ──snapshot, once a second──▶ Hub.push ──▶ { process: latest snapshot }
                                                            + what ended processes had counted
                                     Hub.render ◀── one page, whichever ingress is asked

Totals never run backwards: what a process has counted stays in the sum when it restarts (a new epoch under the
same label) and when it is gone. A replica that is gone for good gives up its label: its totals move to
replica="gone", so labels do not pile up as replicas come and go.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate

import msgspec
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from monitoring.metrics import (
    BY_NAME,
    METRICS,
    PREFIX,
    SNAPSHOT_VERSION,
    Histogram,
    Key,
    Metric,
    Metrics,
    Snapshot,
)
from monitoring.totals import Owner, Totals

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
GAUGE_TTL_S = 10.0
"""A process silent for longer shows no gauges: nobody knows whether they still hold."""
GONE_AFTER_S = 600.0
"""A process silent for longer is taken for gone."""
MAX_SNAPSHOT_BYTES = 1 << 20
MAX_REMEMBERED = 1024
"""Processes taken for gone whose last numbers are kept, in case they come back."""

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(slots=True)
class _Process:
    snapshot: Snapshot
    seen: float

    @property
    def owner(self) -> Owner:
        return (self.snapshot.model_name, self.snapshot.replica)


class Hub:
    """Collects snapshots and renders them. Pure: time comes in as an argument, nothing runs by itself.

    Belongs to one thread.
    """

    def __init__(self, gauge_ttl: float = GAUGE_TTL_S, gone_after: float = GONE_AFTER_S) -> None:
        self._gauge_ttl = gauge_ttl
        self._gone_after = gone_after
        self._processes: dict[str, _Process] = {}
        self._ended = Totals()
        self._gone: OrderedDict[str, Snapshot] = OrderedDict()
        self._own = Metrics("", "hub", "hub")
        self._decoder = msgspec.msgpack.Decoder(Snapshot)

    def push(self, process: str, snapshot: bytes, now: float) -> bool:
        """Take a process's `Metrics.snapshot()`. False when it could not be used; that is counted."""
        if len(snapshot) > MAX_SNAPSHOT_BYTES:
            return self._drop("too_large")
        try:
            news = self._decoder.decode(snapshot)
            _check(news)
        except (msgspec.MsgspecError, ValueError):
            return self._drop("malformed")
        known = self._processes.get(process)
        if known is not None and known.snapshot.epoch == news.epoch:
            if news.sequence <= known.snapshot.sequence:
                return self._drop("out_of_order")
        elif known is not None:
            self._ended.add(known.owner, known.snapshot)
        elif (before := self._gone.pop(process, None)) is not None and before.epoch == news.epoch:
            # It was not gone after all, and its totals, already moved to "gone", come with it again.
            self._ended.add((news.model_name, news.replica), before, sign=-1)
        self._processes[process] = _Process(news, now)
        return True

    def render(self, now: float) -> bytes:
        """All metrics in Prometheus' text format, version 0.0.4 (`CONTENT_TYPE`)."""
        self._retire(now)
        totals = self._ended.copy()
        gauges: dict[str, dict[Key, float]] = {}
        recent: set[str] = set()  # a process that serves several models sends a snapshot for each
        # Oldest first: where two processes have the same label, the one heard last has the say over gauges.
        for process in sorted(self._processes.values(), key=lambda process: process.seen):
            totals.add(process.owner, process.snapshot)
            if now - process.seen <= self._gauge_ttl:
                recent.add(process.snapshot.replica)
                _set_gauges(gauges, process.owner, process.snapshot)
        self._own.set("metrics_processes", len(recent))
        own = self._decoder.decode(self._own.snapshot())
        totals.add(("", "hub"), own)
        _set_gauges(gauges, ("", "hub"), own)
        registry = CollectorRegistry()
        registry.register(_Page([_family(metric, totals, gauges.get(metric.name, {})) for metric in METRICS]))
        return generate_latest(registry)

    def _drop(self, reason: str) -> bool:
        self._own.inc("metrics_snapshots_dropped_total", reason=reason)
        return False

    def _retire(self, now: float) -> None:
        """Move what processes counted that are gone for good to replica="gone"."""
        gone = [name for name, process in self._processes.items() if now - process.seen > self._gone_after]
        for name in gone:
            process = self._processes.pop(name)
            self._ended.add(process.owner, process.snapshot)
            self._gone[name] = process.snapshot
        while len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)
        if gone:
            self._ended.retire({process.owner for process in self._processes.values()})


class _Page(Collector):
    """Families already collected, in the form prometheus_client asks for."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> list[Family]:
        return self._families


def _set_gauges(gauges: dict[str, dict[Key, float]], owner: Owner, snapshot: Snapshot) -> None:
    for name, series in snapshot.values.items():
        if name in BY_NAME and BY_NAME[name].kind == "gauge":
            gauges.setdefault(name, {}).update({(*owner, *key): value for key, value in series})


def _family(metric: Metric, totals: Totals, gauges: dict[Key, float]) -> Family:
    name, labels = PREFIX + metric.name, ["model_name", "replica", *metric.labels]
    if metric.kind == "gauge":
        gauge = GaugeMetricFamily(name, metric.help, labels=labels)
        for key in sorted(gauges):
            gauge.add_metric(key, gauges[key])
        return gauge
    if metric.kind == "counter":
        counter = CounterMetricFamily(name, metric.help, labels=labels)
        for key, value in sorted(totals.counters(metric.name).items()):
            counter.add_metric(key, value)
        return counter
    histogram = HistogramMetricFamily(name, metric.help, labels=["model_name", *metric.labels])
    bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
    for key, merged in sorted(totals.histograms(metric.name).items()):
        buckets = list(zip(bounds, accumulate(merged.counts), strict=True))
        histogram.add_metric(key, buckets, merged.sum)
    return histogram


def _check(snapshot: Snapshot) -> None:
    """Raise ValueError when a snapshot does not fit the table. Metrics of a newer version are passed over."""
    if snapshot.version != SNAPSHOT_VERSION:
        raise ValueError(f"snapshot version {snapshot.version}, expected {SNAPSHOT_VERSION}")
    for name, series in snapshot.values.items():
        for key, value in series:
            _check_value(BY_NAME.get(name), key, value)
    for name, observed in snapshot.histograms.items():
        for key, histogram in observed:
            _check_histogram(BY_NAME.get(name), key, histogram)


def _check_value(metric: Metric | None, key: Key, value: float) -> None:
    if metric is None:
        return
    if metric.kind == "histogram" or len(key) != len(metric.labels):
        raise ValueError(f"{metric.name} does not fit its definition")
    if not math.isfinite(value) or (metric.kind == "counter" and value < 0):
        raise ValueError(f"{metric.name} is {value}")


def _check_histogram(metric: Metric | None, key: Key, histogram: Histogram) -> None:
    if metric is None:
        return
    if len(key) != len(metric.labels) or len(histogram.counts) != len(metric.buckets) + 1:
        raise ValueError(f"{metric.name} does not fit its definition")
    if min(histogram.counts) < 0 or not math.isfinite(histogram.sum):
        raise ValueError(f"{metric.name} has a negative count or an unbounded sum")
