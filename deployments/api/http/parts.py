"""Cuts sent bytes into parts, because a server copies each write within one turn of its event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

PART_BYTES = 2**18
"""Most bytes that are sent in one turn of the event loop."""


def parts_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the concatenated pieces in parts of `PART_BYTES`; the last one may be shorter."""
    waiting, room = list[bytes](), PART_BYTES
    for piece in pieces:
        at = 0
        while len(piece) - at >= room:
            yield b"".join([*waiting, piece[at : at + room]])
            at += room
            waiting, room = [], PART_BYTES
        if at < len(piece):
            waiting.append(piece[at:])
            room -= len(piece) - at
    if waiting:
        yield b"".join(waiting)
