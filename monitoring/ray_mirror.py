"""Mirror of a process's metrics in Ray's own, as ray_raydix_*, for users of Ray's exporters.

counter      its growth since the last report
gauge        its value, every time: Ray forgets a gauge that is not set again within half a minute
histogram    its sum and its count, as two counters *_sum_total and *_count_total: a mean, but no quantiles. Ray
             wants each observation by itself, and a busy engine has thousands a second

Every series carries model_name and replica, and Ray's own labels.
"""

from __future__ import annotations

from collections.abc import Iterable

from ray.util.metrics import Counter, Gauge

from monitoring.metric_table import BY_NAME, PREFIX, Key
from monitoring.metrics import Snapshot
from monitoring.snapshots import read_snapshot

_OWNER = ("model_name", "replica")


class RayMirror:
    """Reports one process's snapshots. Needs a process that Ray started, or that is connected to Ray."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._told: dict[tuple[str, Key], float] = {}

    def report(self, data: bytes) -> None:
        """Report a `Metrics.snapshot()` to Ray; call it about once a second, with snapshots of one process."""
        snapshot = read_snapshot(data)
        for name, series in snapshot.values.items():
            if BY_NAME[name].kind == "gauge":
                for key, value in series:
                    self._gauge(name).set(value, self._tags(name, snapshot, key))
            else:
                self._count(name, name, snapshot, series)
        for name, observed in snapshot.histograms.items():
            self._count(f"{name}_sum", name, snapshot, [(key, histogram.sum) for key, histogram in observed])
            counts = [(key, float(sum(histogram.counts))) for key, histogram in observed]
            self._count(f"{name}_count", name, snapshot, counts)

    def _count(self, name: str, metric: str, snapshot: Snapshot, series: Iterable[tuple[Key, float]]) -> None:
        for key, total in series:
            growth = total - self._told.get((name, key), 0.0)
            if growth > 0:  # Ray rejects 0
                self._counter(name, metric).inc(growth, self._tags(metric, snapshot, key))
                self._told[name, key] = total

    def _counter(self, name: str, metric: str) -> Counter:
        if name not in self._counters:
            keys = (*_OWNER, *BY_NAME[metric].labels)
            self._counters[name] = Counter(PREFIX + name, BY_NAME[metric].help, keys)
        return self._counters[name]

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(PREFIX + name, BY_NAME[name].help, (*_OWNER, *BY_NAME[name].labels))
        return self._gauges[name]

    def _tags(self, metric: str, snapshot: Snapshot, key: Key) -> dict[str, str]:
        owner = {"model_name": snapshot.model_name, "replica": snapshot.replica}
        return owner | dict(zip(BY_NAME[metric].labels, key, strict=True))
