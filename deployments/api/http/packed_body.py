"""Unpacks compressed bodies (Content-Encoding) in pieces of bounded size, in a thread.

    packed, at most max_body_bytes ──▶ piece ──▶ piece ──▶ ... ──▶ body, or 413 as soon as it exceeds the bound

At most the bound and one piece are unpacked, even of a small body that expands enormously.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from starlette.requests import Request

from deployments.api.base.errors import ApiError, invalid, quoted
from deployments.api.base.off_loop import off_loop
from deployments.api.http.body_memory import BodyRoom

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE_BYTES = 256 * 1024
"""Most bytes that are unpacked per step; a piece of packed ones is as large."""
MAX_WINDOW_LOG = 23
"""The largest window of zstd that HTTP allows is 8 MiB (RFC 9659). Unpacking needs this memory besides the
body."""
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class _Broken(Exception):
    """The body does not match its encoding; the message continues "The body is not ..., because"."""


def packing_of(request: Request) -> str | None:
    """Return how a body is packed, None if it is not. Raises `ApiError` 415."""
    given = [value for name, value in request.scope["headers"] if name == b"content-encoding"]
    if not given:
        return None
    name = b", ".join(given).decode("latin-1").strip().lower()
    if name in ("identity", ""):
        return None
    if name not in _PACKINGS:
        known = ", ".join(_PACKINGS)
        raise ApiError(
            415,
            f"The body's content-encoding is {quoted(name)}, and this server knows {known}; send one of these, or "
            "the JSON as it is.",
            headers={"accept-encoding": known},
        )
    return name


async def unpacked(body: bytearray, packing: str, max_bytes: int, room: BodyRoom) -> bytearray:
    """Unpack a body. Its `room` is released, and the room of the unpacked body taken. Raises `ApiError` 400 for a
    body that does not match its encoding, 413 beyond `max_bytes`, and 429.
    """
    pieces, whole = _PACKINGS[packing](memoryview(body)), bytearray()
    try:
        while (piece := await off_loop(partial(next, pieces, None))) is not None:
            room.take(len(piece))
            whole += piece
            if len(whole) > max_bytes:
                message = f"The body has more than {max_bytes} bytes when it is unpacked (limits.max_body_bytes)."
                raise ApiError(413, message, code="request_too_large")
    except _Broken as error:
        raise invalid(f"The body is not {packing}, as its content-encoding says: {error}.") from None
    room.give_back(len(body))
    return whole


def _inflated(body: memoryview, wbits: int) -> Iterator[bytes]:
    unpacker, position = zlib.decompressobj(wbits), 0
    try:
        while position < len(body) and not unpacker.eof:
            rest: bytes | memoryview = body[position : position + PIECE_BYTES]
            position += len(rest)
            while rest:
                yield from _any(unpacker.decompress(rest, PIECE_BYTES))
                rest = unpacker.unconsumed_tail
        while not unpacker.eof and (piece := unpacker.decompress(b"", PIECE_BYTES)):
            yield piece
    except zlib.error:
        raise _Broken("it is damaged") from None
    _check_end(is_complete=unpacker.eof, has_more=bool(unpacker.unused_data) or position < len(body))


def _deflated(body: memoryview) -> Iterator[bytes]:
    """Unpack HTTP's deflate, which is zlib's format; some clients omit its header."""
    has_header = len(body) > 1 and body[0] & 15 == 8 and not (body[0] << 8 | body[1]) % 31
    return _inflated(body, _ZLIB if has_header else _RAW)


def _of_zstd(body: memoryview) -> Iterator[bytes]:
    unpacker = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG})
    position = 0
    try:
        while position < len(body) and not unpacker.eof:
            rest: bytes | memoryview = body[position : position + PIECE_BYTES]
            position += len(rest)
            yield from _any(unpacker.decompress(rest, PIECE_BYTES))
            while not unpacker.needs_input and not unpacker.eof:
                yield from _any(unpacker.decompress(b"", PIECE_BYTES))
    except zstd.ZstdError:
        raise _Broken(f"it is damaged, or needs a window of more than {2**MAX_WINDOW_LOG} bytes") from None
    _check_end(is_complete=unpacker.eof, has_more=bool(unpacker.unused_data) or position < len(body))


def _any(piece: bytes) -> tuple[bytes, ...]:
    return (piece,) if piece else ()


def _check_end(*, is_complete: bool, has_more: bool) -> None:
    if not is_complete:
        raise _Broken("it ends too early")
    if has_more:  # no client sends several parts, and thousands of empty ones would cost much
        raise _Broken("something follows its end")


_PACKINGS: Mapping[str, Callable[[memoryview], Iterator[bytes]]] = {
    "gzip": partial(_inflated, wbits=_GZIP),
    "deflate": _deflated,
    "zstd": _of_zstd,
}
