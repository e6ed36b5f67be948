"""What a replica tells ingresses of its cache: a snapshot to each newcomer, and from then on every change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from deployments.wire import messages
from deployments.wire.session import Session

SNAPSHOT_PART_BYTES = 2**16
"""Of a snapshot's messages, 8,192 hashes: an ingress stops its other work for no longer than one takes to read."""

Post = Callable[[str, Session, bytes], bool]
"""Send a message to an ingress; False when it cannot be sent now."""


class PrefixSource(Protocol):
    """Which prefixes the engine's cache holds, as block hashes. Thread-safe."""

    def drain(self) -> tuple[Collection[int], Collection[int]]:
        """What was stored and evicted since the last call."""
        ...

    def snapshot(self) -> Collection[int]:
        """All that was drained so far, summed up."""
        ...


class PrefixFeed:
    """Belongs to the wire's thread."""

    def __init__(self, source: PrefixSource, period_s: float) -> None:
        self._source, self._period_s = source, period_s
        self._next_at = 0.0

    def tell(self, now: float, epoch: int, sessions: Mapping[str, Session], post: Post) -> None:
        """When it is time: deltas to those who have a snapshot, and then a snapshot to those who have none."""
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
                    # Who misses one gets a snapshot the next time.
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
