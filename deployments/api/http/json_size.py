"""Estimates the size of a parsed JSON text before parsing, because each value costs far more than its bytes.

    {"prompt":[[1],[2]],"user":"a, b"}      marks outside texts: { : [ [ , [ , :

Every value and every name follows one of the marks `,` `:` `[` `{`, so these bound their number. Each mark weighs
the cost of parsing the value that it begins, in units of a number in an array. Marks inside texts are counted too
at first, because that is fastest; only if there are too many, texts are excluded, piece by piece, so that no step
holds the interpreter's lock for long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

_NAMED, NESTED = 5, 10
"""Cost of parsing a name, and an array or object, in units of a number in an array."""
PIECE_BYTES = 64 * 1024
"""Bytes of a body that are looked at together."""


def most_values(body: bytes | bytearray) -> int:
    """Return an upper bound of `count_values(body)`: marks in texts count too."""
    return 1 + body.count(b",") + _NAMED * body.count(b":") + NESTED * (body.count(b"[") + body.count(b"{"))


def count_values(body: bytes | bytearray, enough: float = math.inf) -> int:
    """Return the number of values in `body`, where a named one counts 5 more, an array or object 10. O(bytes).

    Counts no further once there are more than `enough`. Up to the first fault of a text that is not JSON, the
    count is right: a parser makes no more objects.
    """
    num_values = 1
    for outside in _outside_texts(body):
        num_values += most_values(outside) - 1
        if num_values > enough:
            break
    return num_values


def count_names(body: bytes | bytearray) -> int:
    """Count the names in all objects of a JSON text; a name that occurs twice counts twice. O(bytes)."""
    return sum(outside.count(b":") for outside in _outside_texts(body))


def _outside_texts(body: bytes | bytearray) -> Iterator[bytes]:
    """Yield the parts outside of texts, piece by piece."""
    begin, is_inside = 0, False
    while begin < len(body):
        piece = body[begin : begin + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = body[begin : begin + len(piece) + 1]  # an escape and the escaped character stay together
        begin += len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
