"""The feed of a replica's cache contents to ingresses: a snapshot for each new one, then every change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from deployments.wire import messages
from deployments.wire.session import Session

SNAPSHOT_PART_BYTES = 2**16
"""Size of a snapshot's messages, 8,192 hashes each, which bounds the time that reading one blocks an ingress."""

Post = Callable[[str, Session, bytes], bool]
"""Sends a message to an ingress; returns False when it cannot be sent now."""


class PrefixSource(Protocol):
    """The prefixes that the engine's cache holds, as block hashes. Thread-safe."""

    def drain(self) -> tuple[Collection[int], Collection[int]]:
        """Return the hashes stored and evicted since the last call."""
        ...

    def snapshot(self) -> Collection[int]:
        """Return the hashes held, according to all changes drained so far."""
        ...


class PrefixFeed:
    """Sends cache contents to ingresses. Belongs to the wire's thread."""

    def __init__(self, source: PrefixSource, period_s: float) -> None:
        self._source, self._period_s = source, period_s
        self._next_at = 0.0

    def send_due(self, now: float, epoch: int, sessions: Mapping[str, Session], post: Post) -> None:
        """Once a period, send a delta to ingresses that have a snapshot, and a snapshot to the others."""
        if now < self._next_at:
            return
        self._next_at = now + self._period_s
        stored, evicted = self._source.drain()
        newcomers = [(id_, session) for id_, session in sessions.items() if not session.is_synced]
        if stored or evicted:
            packed = messages.pack_hashes(stored), messages.pack_hashes(evicted)
            for ingress_id, session in list(sessions.items()):
                if session.is_synced:
                    delta = messages.PrefixDelta(epoch, session.seq, *packed)
                    # An ingress that misses a delta gets a snapshot in the next period.
                    session.is_synced = post(ingress_id, session, messages.encode(delta))
        if newcomers:
            packed_all = messages.pack_hashes(self._source.snapshot())
            for ingress_id, session in newcomers:
                session.is_synced = self._post_all(epoch, ingress_id, session, packed_all, post)

    def _post_all(self, epoch: int, ingress_id: str, session: Session, packed: bytes, post: Post) -> bool:
        for start in range(0, max(len(packed), 1), SNAPSHOT_PART_BYTES):
            end = start + SNAPSHOT_PART_BYTES
            message = messages.PrefixSnapshot(epoch, session.seq, packed[start:end], is_last=end >= len(packed))
            if not post(ingress_id, session, messages.encode(message)):
                return False
        return True
