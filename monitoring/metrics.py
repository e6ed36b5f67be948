"""One process's values of the metrics in `monitoring/metric_table.py`."""

from __future__ import annotations

import threading
import time
import uuid
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

from monitoring.metric_table import BY_NAME, METRICS, Key, Kind, Metric, Part

SNAPSHOT_VERSION = 1
OLDEST_SNAPSHOT_VERSION = 1
"""The last release's version: older reports are dropped. Reports only grow, by fields with defaults."""
MAX_SERIES = 256
"""Most label combinations of one metric in one process; more are counted under the label value "overflow"."""


class Histogram(msgspec.Struct, array_like=True):
    """Observations by bucket, not cumulative; the last count is of those above all bounds."""

    counts: list[int]
    sum: float = 0.0


class Snapshot(msgspec.Struct):
    """One process's values at one moment, as they travel to the hub."""

    version: int
    epoch: str
    """New with every start of a process, when counters begin at 0. Later epochs sort after earlier ones."""
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
        """`part` says which metrics are shown from the start, at 0; None: all."""
        self.model_name = model_name
        self.replica = replica
        self._epoch = f"{time.time_ns():020}-{uuid.uuid4().hex}"
        self._sequence = 0
        self._lock = threading.Lock()
        self._values: dict[str, dict[Key, float]] = {}
        self._histograms: dict[str, dict[Key, Histogram]] = {}
        # Keys of existing series, by the arguments of the calls that named them: checking these takes longest.
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
        """Return a series of a counter, for callers that count often: the look-up takes most of the time."""
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
        """Return a series of a gauge, for callers that set it often."""
        with self._lock:
            return Gauge(self._values[name], self._key(name, "gauge", labels), self._lock)

    def observe(self, name: str, value: float, count: int = 1, **labels: str) -> None:
        """Add `count` observations of the same value to a histogram."""
        self.series(name, **labels).observe(value, count)

    def series(self, name: str, **labels: str) -> Series:
        """Return a series of a histogram, for callers that observe often: the look-up takes most of the time."""
        with self._lock:
            key = self._key(name, "histogram", labels)
            histogram = self._histograms[name].get(key)
            if histogram is None:
                histogram = self._histograms[name].setdefault(key, _empty(BY_NAME[name]))
        return Series(histogram, BY_NAME[name].buckets, self._lock)

    def snapshot(self) -> bytes:
        """Return all values as msgpack, the argument of `Hub.push`."""
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
            raise KeyError(f"no metric is named {name!r}; monitoring/metric_table.py has them all")
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
