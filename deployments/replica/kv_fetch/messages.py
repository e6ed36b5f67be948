"""The messages between a replica that fetches KV and one that lends it, over a ZeroMQ connection of their own.

    fetcher                              sender
      FetchPages(prompt, window)  ──────────▶            the engine lends what it has of the prompt
                             ◀──────────  Busy      again and again, while the engine computes a step
                             ◀──────────  Lent      so many pages
                             ◀──────────  Page      with the page itself as a second part, `window` of them
      More                   ──────────▶            and as many again
                             ◀──────────  End       all were sent, or no more will be
      Stop                   ──────────▶            the fetcher wants no more

The fetcher grants what is sent, so neither end keeps more than a window of pages in its sockets.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

VERSION = 1
MAX_WINDOW = 2**16
"""Most pages that may be granted at once."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
Pages = Annotated[int, msgspec.Meta(ge=1, le=MAX_WINDOW)]


class FetchPages(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """Lend the whole pages of a prompt, from the page at position `first` on, and send the first of them."""

    version: int
    number: Count
    """Names the transfer on this connection."""
    identity: str
    """`PageMemory.identity` of the fetcher, which the sender's has to equal."""
    model: str
    """The model's name, part of the prompt's namespace."""
    salt: str
    prompt_ids: bytes
    """Token ids, int32, little endian."""
    first: Count
    window: Pages
    """Pages that may be sent."""


class More(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Send further pages."""

    number: Count
    count: Pages


class Stop(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Send nothing more."""

    number: Count


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


ToSender = FetchPages | More | Stop
ToFetcher = Lent | Page | End | Busy

encode = msgspec.msgpack.Encoder().encode
_to_sender: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)
_to_fetcher: msgspec.msgpack.Decoder[ToFetcher] = msgspec.msgpack.Decoder(ToFetcher)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_to_sender(data: bytes) -> ToSender | None:
    """Decode a fetcher's message; None if it is none."""
    try:
        return _to_sender.decode(data)
    except _UNREADABLE:
        return None


def decode_to_fetcher(data: bytes) -> ToFetcher | None:
    """Decode a sender's message; None if it is none."""
    try:
        return _to_fetcher.decode(data)
    except _UNREADABLE:
        return None
