"""What was used last, as much as fits into so many bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Values by key, of which the least recently used go first. For one thread at a time."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds the sum of what the entries count; 0 keeps none."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.num_bytes = 0
        """Bytes that the entries count together."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return what is kept under a key, which counts as its use; None where there is nothing."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Keep a value in place of another under its key; one that is larger than the bound is not kept."""
        self.drop(key)
        if num_bytes > self._max_bytes:
            return
        self._entries[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, key: K) -> None:
        """Forget what is kept under a key, if anything is."""
        _, num_bytes = self._entries.pop(key, (None, 0))
        self.num_bytes -= num_bytes
