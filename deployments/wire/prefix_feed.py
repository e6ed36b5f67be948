"""The feed of a replica's cache contents to ingresses: every change, and a snapshot, part by part as they ask.

    when asked     part 1                  part 2                              last part
    each period           delta ── delta ─────────── delta ── delta ── delta ─────────── delta ── delta ...

Deltas and parts come from one thread and in one order. A part has only blocks that are held when it is sent, and
blocks stored after the first part are in a delta, so parts and deltas together are the cache's contents.

A second feed reports the files from which the replica reads, to ingresses that ask it for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple, Protocol

from deployments.wire import messages
from deployments.wire.session import Knowledge, Session

PART_BLOCKS = 4096
"""Most blocks of a message, which bounds the time for which decoding it blocks an ingress."""

Post = Callable[[str, Session, bytes], bool]
"""Sends a message to an ingress; returns False when it cannot be sent now."""


class PrefixSource(Protocol):
    """The prefixes that the engine's cache holds, as block hashes. Thread-safe."""

    def drain(self) -> tuple[Collection[int], Collection[int]]:
        """Return the hashes stored and evicted since the last call."""
        ...

    def drain_moves(self) -> Mapping[int, int]:
        """Return the blocks held at the last drain whose reported tier is outdated, and their fastest tier."""
        ...

    def tiers(self, hashes: Sequence[int]) -> bytes:
        """Return the reported tier of each block, a byte each; empty if all are on the device."""
        ...

    def snapshot(self) -> Iterator[int]:
        """Yield the hashes held at the last drain, the hottest first, without those evicted meanwhile."""
        ...


class NoPrefixes:
    """The source of a cache that is not reported: it holds nothing."""

    def drain(self) -> tuple[Collection[int], Collection[int]]:
        """Return that nothing has changed."""
        return (), ()

    def drain_moves(self) -> Mapping[int, int]:
        """Return that nothing has moved."""
        return {}

    def tiers(self, hashes: Sequence[int]) -> bytes:
        """Return that all are on the device."""
        return b""

    def snapshot(self) -> Iterator[int]:
        """Yield nothing."""
        return iter(())


class SnapshotPart(NamedTuple):
    """A part of a snapshot, to be sent."""

    hashes: bytes
    is_first: bool
    is_last: bool
    tiers: bytes = b""
    is_store: bool = False

    def encoded(self, epoch: int, seq: int) -> bytes:
        """Return the message with this part."""
        return messages.encode(messages.PrefixSnapshot(epoch, seq, *self))


class PrefixFeed:
    """Tracks what each ingress knows of the cache, or of a store. Belongs to the wire's thread."""

    def __init__(self, source: PrefixSource, period_s: float, *, is_store: bool = False) -> None:
        self._source, self._period_s, self._is_store = source, period_s, is_store
        self._next_at = 0.0

    def send_due(self, now: float, epoch: int, sessions: Mapping[str, Session], post: Post) -> None:
        """Once a period, send the changes to the ingresses whose snapshots have begun.

        An ingress that misses a change starts again: it receives an empty first part, and asks for the others.
        """
        if now < self._next_at:
            return
        self._next_at = now + self._period_s
        pieces = [*_pieces(*self._source.drain()), *_moves(self._source.drain_moves())]
        for ingress_id, session in list(sessions.items()):
            known = self._known(session)
            if known.knowledge == "outdated":
                part = SnapshotPart(b"", is_first=True, is_last=False, is_store=self._is_store)
                self._begin(known)
                self.sent(session, part, post(ingress_id, session, part.encoded(epoch, session.seq)), "outdated")
            elif known.knowledge == "current":
                for piece in pieces:
                    delta = messages.PrefixDelta(epoch, session.seq, *piece, self._is_store)
                    if not post(ingress_id, session, messages.encode(delta)):
                        known.knowledge, known.snapshot = "outdated", None
                        break

    def next_part(self, session: Session) -> SnapshotPart:
        """Return the part that an ingress has requested; call `sent` then. O(its blocks), for the first O(all)."""
        known = self._known(session)
        is_first = known.wants_first or known.knowledge != "current" or known.snapshot is None
        if is_first:
            self._begin(known)
        assert known.snapshot is not None
        hashes = list(islice(known.snapshot, PART_BLOCKS))
        packed, is_last = messages.pack_hashes(hashes), len(hashes) < PART_BLOCKS
        return SnapshotPart(packed, is_first, is_last, self._source.tiers(hashes), self._is_store)

    def sent(
        self, session: Session, part: SnapshotPart, is_sent: bool, otherwise: Literal["none", "outdated"] = "none"
    ) -> None:
        """Note whether a part was sent. If not, an ingress that has requested it asks again after a while."""
        known = self._known(session)
        if not is_sent:
            known.knowledge = otherwise
        if part.is_last or not is_sent:
            known.snapshot = None

    def _known(self, session: Session) -> Knowledge:
        return session.store if self._is_store else session.cache

    def _begin(self, known: Knowledge) -> None:
        known.snapshot, known.knowledge, known.wants_first = self._source.snapshot(), "current", False


_Piece = tuple[bytes, bytes, bytes, bytes]
"""The hashes stored, evicted and moved, and the tiers of the latter."""


def _moves(moves: Mapping[int, int]) -> Iterator[_Piece]:
    """Divide moves between tiers into messages."""
    left = iter(moves.items())
    while piece := dict(islice(left, PART_BLOCKS)):
        yield b"", b"", messages.pack_hashes(piece), bytes(piece.values())


def _pieces(stored: Collection[int], evicted: Collection[int]) -> Iterator[_Piece]:
    """Divide a change into messages. No block is both stored and evicted, so their order does not matter."""
    new, gone = iter(stored), iter(evicted)
    while True:
        arrived = list(islice(new, PART_BLOCKS))
        left = list(islice(gone, PART_BLOCKS - len(arrived)))
        if not arrived and not left:
            return
        yield messages.pack_hashes(arrived), messages.pack_hashes(left), b"", b""
