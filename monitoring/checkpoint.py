"""Checkpoints of a hub: the state of its last page, for the hub that replaces it.

Hub ──page and checkpoint──▶ keepers (the ingresses) ──the newest one──▶ the next Hub

A process that reads a page gets its checkpoint with it, so values that Prometheus has seen outlive the hub. A new
hub starts from the newest checkpoint; until every keeper has reported, it has no page to show.
"""

from __future__ import annotations

import msgspec

from monitoring.totals import TotalsState

VERSION = 1
Stamp = tuple[int, int]
"""Orders checkpoints: the hub's generation, and a number that it increments."""
Kept = tuple[Stamp, bytes]
"""An encoded checkpoint as keepers hold it."""


class KeptProcess(msgspec.Struct, array_like=True):
    """A process as a hub knew it."""

    snapshot: bytes
    was_recent: bool


class Checkpoint(msgspec.Struct):
    """All of a hub's state except its own gauges."""

    version: int
    stamp: Stamp
    ended: TotalsState
    processes: dict[str, KeptProcess]
    gone: dict[str, bytes]
    """Last snapshots of processes that count as gone."""
    own: bytes
    """The hub's own snapshot."""


def encode(checkpoint: Checkpoint) -> bytes:
    """Return a checkpoint as bytes."""
    return msgspec.msgpack.encode(checkpoint)


def decode(data: bytes) -> Checkpoint:
    """Return the checkpoint of `encode`'s bytes. Raises ValueError."""
    try:
        checkpoint = msgspec.msgpack.decode(data, type=Checkpoint)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a checkpoint: {error}") from None
    if checkpoint.version != VERSION:
        raise ValueError(f"checkpoint version {checkpoint.version}, expected {VERSION}")
    return checkpoint


class Handover:
    """The wait of a new hub for a report of every keeper and of every process known to be alive.

    The wait ends after `patience_s`: a process that was lost together with the old hub never reports.
    """

    def __init__(self, num_keepers: int, patience_s: float, born: float) -> None:
        self.best: Checkpoint | None = None
        """The newest checkpoint so far."""
        self._num_keepers, self._until = num_keepers, born + patience_s
        self._heard: set[str] = set()

    def wants(self, keeper: str, held: Stamp | None) -> bool:
        """Note which checkpoint a keeper holds; return whether the keeper should send it."""
        if held is not None and (self.best is None or held > self.best.stamp):
            return True
        self._heard.add(keeper)
        return False

    def offer(self, keeper: str, checkpoint: Checkpoint) -> None:
        """Store a keeper's checkpoint if it is the newest."""
        self._heard.add(keeper)
        if self.best is None or checkpoint.stamp > self.best.stamp:
            self.best = checkpoint

    def is_over(self, reported: set[str], now: float) -> bool:
        """Whether all processes that can still be alive have reported; `reported` are those that have."""
        if now >= self._until:
            return True
        if len(self._heard) < self._num_keepers:
            return False
        expected = () if self.best is None else self.best.processes.items()
        return all(name in reported for name, kept in expected if kept.was_recent)
