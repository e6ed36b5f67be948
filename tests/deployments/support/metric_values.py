"""Read a counter of one process, by way of the snapshot that travels to the hub."""

from __future__ import annotations

import msgspec

from monitoring.metrics import BY_NAME, Metrics, Snapshot


def count_of(metrics: Metrics, name: str, **labels: str) -> float:
    """The counter's value for these labels; 0 when it never rose."""
    snapshot = msgspec.msgpack.decode(metrics.snapshot(), type=Snapshot)
    key = tuple(labels[label] for label in BY_NAME[name].labels)
    return dict(snapshot.values[name]).get(key, 0.0)
