"""Reads metrics: those of one process from the snapshot that it would push to the hub, or from a page."""

from __future__ import annotations

import msgspec

from monitoring.metric_table import BY_NAME
from monitoring.metrics import Metrics, Snapshot

Values = dict[tuple[str, ...], float]


def snapshot_of(metrics: Metrics) -> Snapshot:
    """The snapshot as the hub reads it."""
    return msgspec.msgpack.decode(metrics.snapshot(), type=Snapshot)


def count_of(metrics: Metrics, name: str, **labels: str) -> float:
    """The counter's value for these labels; 0 when it never rose."""
    key = tuple(labels[label] for label in BY_NAME[name].labels)
    return dict(snapshot_of(metrics).values[name]).get(key, 0.0)


def observations_of(metrics: Metrics) -> tuple[dict[str, Values], dict[str, int]]:
    """The values of all counters and gauges by labels, and the number of observations of each histogram."""
    snapshot = snapshot_of(metrics)
    counts = {name: sum(sum(h.counts) for _, h in series) for name, series in snapshot.histograms.items()}
    return {name: dict(series) for name, series in snapshot.values.items()}, counts


def sum_on_page(page: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples on a page for Prometheus whose labels match."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(want in line for want in wanted)
    )
