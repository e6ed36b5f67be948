"""Remembers the token ids of texts, within a bound on memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from sys import getsizeof

_ENTRY_BYTES = 160
"""Memory of an entry besides its text and its ids: the key, its places in the ordered dict, and unused bytes."""
Ids = tuple[int, ...]


class PieceCache:
    """Texts with their token ids; the least recently used are evicted first. Thread-safe.

    Texts are kept by salt, as the engines' KV is, so a request's duration reveals nothing about the texts of
    tenants with another salt.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds the memory of all entries; 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], Ids] = OrderedDict()
        # Each id is one object, however many entries have it: 8 bytes for each token rather than 40.
        self._shared: dict[int, int] = {}
        self.num_bytes = 0

    def find(self, salt: str, texts: Sequence[str]) -> list[Ids | None]:
        """Return the ids of each text, or None where they are not known."""
        entries, found = self._entries, []
        with self._lock:
            for text in texts:
                key = (salt, text)
                ids = entries.get(key)
                if ids is not None:
                    entries.move_to_end(key)
                found.append(ids)
        return found

    def keep(self, salt: str, new: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Remember texts and their ids."""
        with self._lock:
            for text, ids in new:
                self._keep((salt, text), tuple(map(self._shared.setdefault, ids, ids)))

    def _keep(self, key: tuple[str, str], ids: Ids) -> None:
        size = _size(key, ids)
        if size > self._max_bytes or key in self._entries:
            return
        self._entries[key] = ids
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(*self._entries.popitem(last=False))


def _size(key: tuple[str, str], ids: Ids) -> int:
    """Memory of an entry in bytes. A salt is counted for each of its texts, as each request brings its own."""
    return getsizeof(key[0]) + getsizeof(key[1]) + getsizeof(ids) + _ENTRY_BYTES
