"""Validation of process reports against the table of metric definitions."""

from __future__ import annotations

import math

import msgspec

from monitoring.metric_table import BY_NAME, Key, Metric
from monitoring.metrics import OLDEST_SNAPSHOT_VERSION, Histogram, Snapshot

_decoder = msgspec.msgpack.Decoder(Snapshot)


def read_snapshot(data: bytes) -> Snapshot:
    """Decode a process's `Metrics.snapshot()`, without metrics of a newer version. Raises ValueError."""
    try:
        snapshot = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:  # surplus fields may be nested deeply
        raise ValueError(f"not a snapshot: {error}") from None
    if snapshot.version < OLDEST_SNAPSHOT_VERSION:
        raise ValueError(f"snapshot version {snapshot.version}, expected at least {OLDEST_SNAPSHOT_VERSION}")
    for name, series in snapshot.values.items():
        for key, value in series:
            _check_value(BY_NAME.get(name), key, value)
    for name, observed in snapshot.histograms.items():
        for key, histogram in observed:
            _check_histogram(BY_NAME.get(name), key, histogram)
    return snapshot


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
