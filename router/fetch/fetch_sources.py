"""The replicas and files from which a prompt's KV can be fetched, as this process knows them, and planned fetches.

Rates are in tokens/s and sizes in tokens here, as replicas report them: the KV of every token has the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from cache.news.tier import Tier
from router.addresses import KVAddress, is_store
from router.candidates import Candidates
from router.cost import RouteQuery
from router.fetch.fetching import FetchQuery, Source, best_fetch
from router.fleet import Fleet
from router.overlap import Overlap

NUM_SOURCES = 2
"""Most holders of a prompt's beginning from which a replica may fetch."""
_MOST_ASKED = 8
"""Replicas expected to hold it whose own reports are looked up."""


class PlannedFetch(NamedTuple):
    """A fetch for a request by its replica."""

    source: str
    """The replica that has it, or the store of files."""
    address: KVAddress | None
    """The source's address; None for files, which the replica reads by itself."""
    num_tokens: int
    """Leading tokens of the prompt that the source has."""
    fetched: int
    """Those of them that the request's replica lacks."""


class ReadableFiles(Mapping[str, Source]):
    """By replica, how much of a prompt it has with the files that it reads. Computed on demand."""

    def __init__(
        self, stores: Mapping[str, str], replicas: Candidates, overlap: Overlap, reach: Callable[[str, int], int]
    ) -> None:
        """`stores` is by replica. `reach` returns how many leading tokens there are together with a store's files,
        given the number that the replica has.
        """
        self._stores, self._replicas, self._overlap, self._reach = stores, replicas, overlap, reach
        self._reached: dict[tuple[str, int], int] = {}

    def __getitem__(self, replica: str) -> Source:
        store, candidate = self._stores[replica], self._replicas.serving[replica]
        rate = candidate.load_rates[Tier.FILE - 1] if len(candidate.load_rates) >= Tier.FILE else 0.0
        key = store, self._overlap.get(replica, 0)
        if key not in self._reached:
            self._reached[key] = self._reach(*key)
        if not rate or self._reached[key] <= key[1]:
            raise KeyError(replica)
        return Source(store, self._reached[key], rate, 0.0)

    def __iter__(self) -> Iterator[str]:
        return (replica for replica in self._stores if replica in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self._stores)


class FetchSources:
    """Plans the fetches of one deployment's requests. Not thread-safe: its owner locks."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._transfers: Counter[str] = Counter()
        """Fetches in progress that this process planned, counted at both ends."""
        self._planned: dict[str, tuple[PlannedFetch, str]] = {}
        """Fetches of open requests without a token yet, and the replica that fetches."""

    def query(
        self, query: RouteQuery, overlap: Overlap, replicas: Candidates, reach: Callable[[str, int], int]
    ) -> RouteQuery:
        """Return the prompt with the best holders and the files as its sources; unchanged if there are none.

        `reach` is that of `ReadableFiles`; for a replica, it returns how much that has reported.
        """
        stores = self._fleet.stores()
        peers = self._peers(overlap, reach)
        if not peers and not stores:
            return query
        return FetchQuery(
            query.num_tokens,
            query.overlap,
            query.key,
            query.session,
            query.utilisation,
            query.chain,
            peers,
            ReadableFiles(stores, replicas, overlap, reach) if stores else None,
            self._transfers,
            1.0,
        )

    def _peers(self, overlap: Overlap, reach: Callable[[str, int], int]) -> list[Source]:
        """Return the deepest holders that lend. Only their own reports count: KV that a replica is about to
        compute is not there yet.
        """
        lenders, rate = self._fleet.lenders(), self._fleet.fetch_rate()
        if not lenders or not rate:
            return []
        held = ((name, reach(name, 0)) for name in islice(self._lending(overlap, lenders), _MOST_ASKED))
        there = ((name, num_tokens) for name, num_tokens in held if num_tokens)
        return [Source(name, num_tokens, rate, 0.0) for name, num_tokens in islice(there, NUM_SOURCES)]

    def _lending(self, overlap: Overlap, lenders: Mapping[str, KVAddress]) -> Iterator[str]:
        for _, mask in overlap.levels:
            same = [name for name in overlap.names(mask) if name in lenders]
            yield from sorted(same, key=self._transfers.__getitem__)

    def best_holder(self, overlap: Overlap) -> tuple[KVAddress, int] | None:
        """Return the replica that lends most of a prompt, and how many of its tokens."""
        lenders = self._fleet.lenders()
        name = next((name for name in overlap if name in lenders), None) if lenders else None
        return None if name is None else (lenders[name], overlap[name])

    def plan(self, request_id: str, query: RouteQuery, replica: str, replicas: Candidates) -> PlannedFetch | None:
        """Return the fetch that `replica`, one of `replicas`, should make for a request, if any; it counts until
        `end`.
        """
        self.end(request_id)
        candidate = replicas.serving.get(replica) if isinstance(query, FetchQuery) else None
        fetch = None if candidate is None else best_fetch(query, candidate)
        if fetch is None:
            return None
        address = self._fleet.lenders().get(fetch.source.name)
        if address is None and not is_store(fetch.source.name):  # The source has left meanwhile.
            return None
        self._transfers.update(_ends(fetch.source.name, replica))
        planned = PlannedFetch(fetch.source.name, address, fetch.source.tokens, fetch.tokens)
        self._planned[request_id] = planned, replica
        return planned

    def planned(self, request_id: str) -> PlannedFetch | None:
        """Return the fetch of a request, until it has ended."""
        planned = self._planned.get(request_id)
        return None if planned is None else planned[0]

    def end(self, request_id: str) -> None:
        """Note that a request's fetch is over, if there was one. Idempotent."""
        planned = self._planned.pop(request_id, None)
        for name in () if planned is None else _ends(planned[0].source, planned[1]):
            self._transfers[name] -= 1
            if not self._transfers[name]:
                del self._transfers[name]


def _ends(source: str, reader: str) -> tuple[str, ...]:
    """Return the owners of the bandwidth that a transfer uses. For files this is only the reader, whose
    rate was measured during other readers' transfers.
    """
    return (reader,) if is_store(source) else (source, reader)
