"""Which replica tells an ingress what lies in a store of files: one of those that share it, and one at a time.

    replicas a, b and c read from it      a tells      a is gone: b tells, from the start

So a block in a store is told once, and not by each of its readers. What is known of it stays known meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable


class StoreTellers:
    """The replicas that answer, by the store from which they read. Lives on one event loop."""

    def __init__(self, begin: Callable[[str], None], leave: Callable[[str], None]) -> None:
        """`begin` has a store told from the start, by the replica that `of` returns; `leave`: by nobody."""
        self._begin, self._leave = begin, leave
        self._readers: dict[str, dict[str, None]] = {}  # by store; the first one tells
        self._store_of: dict[str, str] = {}

    def of(self, store: str) -> str:
        """Return the replica that tells. Raises KeyError where no replica reads from the store."""
        return next(iter(self._readers[store]))

    def begin(self, replica: str, store: str) -> None:
        """Note that a replica could tell, and that nothing is known for sure of what it told before."""
        self._store_of[replica] = store
        self._readers.setdefault(store, {}).setdefault(replica)
        if self.of(store) == replica:
            self._begin(store)

    def leave(self, replica: str) -> None:
        """Note that a replica does not answer, or is gone. Idempotent."""
        store = self._store_of.pop(replica, None)
        if store is None:
            return
        readers, has_told = self._readers[store], self.of(store) == replica
        del readers[replica]
        if not readers:
            del self._readers[store]
            self._leave(store)
        elif has_told:
            self._begin(store)
