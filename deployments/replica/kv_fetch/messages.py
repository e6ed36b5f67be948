"""The messages between a replica that fetches KV and one that lends it, over a ZeroMQ connection of their own.

    fetcher                              sender
      FetchPages(prompt, window)  ──────────▶            the engine lends its pages of the prompt
                             ◀──────────  Busy      repeatedly, while the engine computes a step
                             ◀──────────  Lent      so many pages
                             ◀──────────  Page      with the page itself as a second part, `window` of them
      More                   ──────────▶            as many more
                             ◀──────────  End       all were sent, or no more will be
      Stop                   ──────────▶            the fetcher wants no more

Where both can, the fetcher reads the pages in the sender's memory itself, a window at a time:

      FetchPages(reads)      ──────────▶
                             ◀──────────  Readable  where the pages are
      Check                  ──────────▶            so many were read
                             ◀──────────  Held      they were lent until now, with their checksums
                             ◀──────────  End       all were read, or no more are lent

The fetcher grants the pages to send, so neither end keeps more than a window of pages in its sockets.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

VERSION = 1
OLDEST_VERSION = 1
"""The last release's version: an older fetcher is refused. Messages grow as `deployments.wire.messages` says."""
MAX_WINDOW = 2**16
"""Most pages that may be granted together."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
Pages = Annotated[int, msgspec.Meta(ge=1, le=MAX_WINDOW)]
PageId = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Address = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class FetchPages(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """Lend the whole pages of a prompt, from the page at position `first` on, and send the first of them."""

    version: int
    number: Count
    """Names the transfer on this connection."""
    identity: str
    """`PageMemory.identity` of the fetcher, which must equal the sender's."""
    model: str
    """The model's name, part of the prompt's namespace."""
    salt: str
    prompt_ids: bytes
    """Token ids, int32, little endian."""
    first: Count
    window: Pages
    """Pages that may be sent."""
    reads: bool = False
    """Whether the fetcher can read the pages itself: then none is sent if the sender permits that."""


class More(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Send further pages."""

    number: Count
    count: Pages


class Stop(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Send nothing more."""

    number: Count


class Check(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Pages were read: are they the ones that were lent?"""

    number: Count
    position: Count
    """Position of the first of them in the prompt, in pages."""
    count: Pages


class Lent(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """So many pages will come."""

    number: Count
    count: Count


class Page(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """The next page, whose bytes are the message's second part."""

    number: Count
    position: Count
    """Position in the prompt, in pages."""
    checksum: int
    """CRC-32 of the bytes."""


class End(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """No page follows."""

    number: Count
    reason: str = ""
    """Why not all pages came; "" if they did."""


class Busy(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """The pages are lent when the engine's step has ended."""

    number: Count


class Region(msgspec.Struct, array_like=True, frozen=True):
    """Where pages of one kind are, as in `PageRegion`."""

    gpu: Annotated[int, msgspec.Meta(ge=0, le=2**16)] | None
    starts: list[Address]
    stride: Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class Readable(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """The lent pages are here: those of the device, then those of the host."""

    number: Count
    agent: bytes
    """`NixlAgent.metadata` of the sender."""
    device_region: Region
    device: list[PageId]
    host_region: Region
    host: list[PageId]


class Held(msgspec.Struct, tag=15, array_like=True, frozen=True):
    """The pages were lent, and so unchanged, until after the `Check`."""

    number: Count
    position: Count
    """As in the `Check`."""
    checksums: list[int]
    """XXH3 of each page, 64 bits; none if the pages are in a GPU's memory."""


ToSender = FetchPages | More | Stop | Check
ToFetcher = Lent | Page | End | Busy | Readable | Held

encode = msgspec.msgpack.Encoder().encode
_to_sender: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)
_to_fetcher: msgspec.msgpack.Decoder[ToFetcher] = msgspec.msgpack.Decoder(ToFetcher)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_to_sender(data: bytes) -> ToSender | None:
    """Decode a fetcher's message; None if it is invalid."""
    try:
        return _to_sender.decode(data)
    except _UNREADABLE:
        return None


def decode_to_fetcher(data: bytes) -> ToFetcher | None:
    """Decode a sender's message; None if it is invalid."""
    try:
        return _to_fetcher.decode(data)
    except _UNREADABLE:
        return None
