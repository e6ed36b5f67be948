"""Holds the bytes that a connection has received but not parsed, and bounds how many are parsed per turn.

A piece never holds more than the end of one request, so a request is parsed only when the one before is answered:

    GET / ... \\r\\n\\r\\n│POST / ... \\r\\n\\r\\n│a body of known length│GET / ...      a piece ends at each bar

All heads end with an empty line, as do all chunked bodies.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

PIECE_BYTES = 2048
"""Most bytes that are parsed per turn, except bodies of known length: every few bytes may cause a callback."""
PIECE_COST = 64
"""A short piece takes as long as one of so many bytes."""
TURN_S = 0.002
"""Seconds for which connections that wait may parse in one turn of the event loop, each its piece."""
_END = b"\r\n\r\n"


class Unparsed:
    """The bytes of one connection, in the order in which they came."""

    def __init__(self) -> None:
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._data)

    def add(self, data: bytes) -> None:
        """Add what arrived."""
        self._data += data

    def clear(self) -> None:
        """Drop all of it."""
        self._data = bytearray()

    def cut(self, body_left: int) -> bytes:
        """Take the next piece. `body_left` is the missing part of a body of known length, 0 outside of one."""
        size = min(body_left, len(self._data)) or self._to_end()
        piece = bytes(self._data[:size])
        del self._data[:size]
        return piece

    def _to_end(self) -> int:
        if self._data[0] in _END:  # The end may have begun in the previous piece.
            return 1
        at = self._data.find(_END, 0, PIECE_BYTES)
        return PIECE_BYTES if at < 0 else at + len(_END)


class ParseTurns:
    """The connections of one event loop that wait to parse, in order of arrival. Small pieces are parsed
    immediately. Many clients that send much therefore do not delay everything else in one turn.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_called = False

    @property
    def is_busy(self) -> bool:
        """Whether any connection waits."""
        return bool(self._waiting)

    def wait(self, parse: Callable[[], None]) -> None:
        """Call `parse`, which parses as much as one turn allows and may wait again, when its turn has come."""
        self._waiting.append(parse)
        self._call()

    def _call(self) -> None:
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        ends_at = time.perf_counter() + TURN_S
        while self._waiting:
            self._waiting.popleft()()
            if time.perf_counter() >= ends_at:
                break
        self._is_called = False
        if self._waiting:
            self._call()
