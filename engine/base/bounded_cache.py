"""A cache of the most recently used values, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Values by key; the least recently used are dropped first. For one thread at a time."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds the sum of the entries' sizes; 0 keeps none."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.num_bytes = 0
        """Sum of the entries' sizes, in bytes."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of a key, which counts as its use; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Keep a value, replacing an earlier one of its key. A value larger than the bound is not kept."""
        self.drop(key)
        if num_bytes > self._max_bytes:
            return
        self._entries[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, key: K) -> None:
        """Forget the value of a key, if there is one."""
        _, num_bytes = self._entries.pop(key, (None, 0))
        self.num_bytes -= num_bytes
