"""Draws unguessable ids and seeds from the kernel's randomness, many per system call.

A system call takes up to fifteen microseconds on a virtual machine, and a request needs three such values.
"""

from __future__ import annotations

import os
import threading

POOL_BYTES = 4096


class RandomPool:
    """Hands out each byte of `os.urandom` once. Thread-safe; a forked process draws its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes, self._at = b"", 0
        os.register_at_fork(after_in_child=self._begin_anew)

    def take(self, count: int) -> bytes:
        """Return `count` bytes, at most `POOL_BYTES`."""
        with self._lock:
            begin, end = self._at, self._at + count
            if end > len(self._bytes):
                self._bytes, begin, end = os.urandom(POOL_BYTES), 0, count
            self._at = end
            return self._bytes[begin:end]

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._bytes, self._at = b"", 0


_pool = RandomPool()


def random_hex(num_bytes: int) -> str:
    """Return twice as many hexadecimal digits, as `secrets.token_hex` does."""
    return _pool.take(num_bytes).hex()


def random_below(end: int) -> int:
    """Return a number from 0 to `end` - 1, which may be up to 2**64: all are as likely, within one in 2**64."""
    return int.from_bytes(_pool.take(16), "little") % end
