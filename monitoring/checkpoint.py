"""Checkpoints of a hub: all that its last page was made of, for the hub that replaces it.

Hub ──page and checkpoint──▶ keepers (the ingresses) ──the newest one──▶ the next Hub

A process that reads a page gets its checkpoint along with it, so what Prometheus has seen outlives the hub. A new
hub starts from the newest checkpoint; until every keeper has reported, it has no page to show.
"""

from __future__ import annotations

import msgspec

from monitoring.totals import TotalsState

VERSION = 1
Stamp = tuple[int, int]
"""Orders checkpoints: the hub's generation, and a number that it counts up."""
Kept = tuple[Stamp, bytes]
"""An encoded checkpoint as keepers hold it."""


class KeptProcess(msgspec.Struct, array_like=True):
    """A process as a hub knew it."""

    snapshot: bytes
    was_recent: bool


class Checkpoint(msgspec.Struct):
    """All of a hub's state but the gauges of its own."""

    version: int
    stamp: Stamp
    ended: TotalsState
    processes: dict[str, KeptProcess]
    gone: dict[str, bytes]
    """Last snapshots of processes taken for gone."""
    own: bytes
    """The hub's own snapshot."""


def encode(checkpoint: Checkpoint) -> bytes:
    """To travel."""
    return msgspec.msgpack.encode(checkpoint)


def decode(data: bytes) -> Checkpoint:
    """What `encode` gave. Raises ValueError."""
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
        """A keeper says which checkpoint it holds; whether it should be handed over."""
        if held is not None and (self.best is None or held > self.best.stamp):
            return True
        self._heard.add(keeper)
        return False

    def offer(self, keeper: str, checkpoint: Checkpoint) -> None:
        """A keeper's checkpoint."""
        self._heard.add(keeper)
        if self.best is None or checkpoint.stamp > self.best.stamp:
            self.best = checkpoint

    def is_over(self, reported: set[str], now: float) -> bool:
        """Whether all have been heard of that there is any hope for; `reported` are the processes so far."""
        if now >= self._until:
            return True
        if len(self._heard) < self._num_keepers:
            return False
        expected = () if self.best is None else self.best.processes.items()
        return all(name in reported for name, kept in expected if kept.was_recent)
