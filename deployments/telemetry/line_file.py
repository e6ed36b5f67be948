"""Lines that are appended to a file, several at a time, and dropped instead of waiting.

The file may be a pipe, whose reader may be slow or gone: no write waits for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

BATCH_S = 0.1
"""Seconds that a line may wait for others."""
MAX_WAITING = 1024
"""Most waiting lines; of further lines in that time, only the number is written."""
_PIPE_BYTES = 4096
"""Bytes of a write that a pipe takes completely or not at all, so that lines of several processes do not mix."""


class LineFile:
    """A file of lines. Lives on one event loop."""

    def __init__(self, path: str) -> None:
        """The file is opened with the first line, and created if it is missing."""
        self.path = path
        self._file: int | None = None
        self._waiting: list[bytes] = []
        self._num_dropped = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, line: str) -> None:
        """Write a line with the next batch."""
        if len(self._waiting) >= MAX_WAITING:
            self._num_dropped += 1
            return
        self._waiting.append(line.encode("utf-8", "replace") + b"\n")
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_S, self.flush)

    def flush(self) -> None:
        """Write the waiting lines, as many as the file takes now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._waiting = self._waiting, []
        if self._num_dropped:
            lines.append(b"(%d more lines)\n" % self._num_dropped)
            self._num_dropped = 0
        try:
            for block in _blocks(lines):
                self._write(block)
        except OSError:  # no reader, or the place is gone: the next line retries
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent; a further line opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, block: list[bytes]) -> None:
        if self._file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o600)
        try:
            os.write(self._file, b"".join(block))
        except BlockingIOError:  # a full pipe: lines that its reader is too slow for are counted
            self._num_dropped += len(block)


def _blocks(lines: list[bytes]) -> Iterator[list[bytes]]:
    block: list[bytes] = []
    for line in lines:
        if block and sum(map(len, block)) + len(line) > _PIPE_BYTES:
            yield block
            block = []
        block.append(line)
    if block:
        yield block
