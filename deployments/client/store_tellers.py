"""The replica that reports to an ingress the contents of a store of files: one at a time of those that share it.

    replicas a, b and c read from it      a reports    a is gone: b reports, from the start

So a block in a store is reported once, not by each of its readers. What is known of the store stays known.
"""

from __future__ import annotations

from collections.abc import Callable


class StoreTellers:
    """The replicas that answer, by the store from which they read. Lives on one event loop."""

    def __init__(self, begin: Callable[[str], None], leave: Callable[[str], None]) -> None:
        """`begin` starts the reports on a store, by the replica that `of` returns; `leave` ends them."""
        self._begin, self._leave = begin, leave
        self._readers: dict[str, dict[str, None]] = {}  # store -> its replicas, of which the first one reports
        self._store_of: dict[str, str] = {}

    def of(self, store: str) -> str:
        """Return the replica that reports. Raises KeyError where no replica reads from the store."""
        return next(iter(self._readers[store]))

    def begin(self, replica: str, store: str) -> None:
        """Note that a replica could report, and that its earlier reports may be incomplete."""
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
