"""Fetch or compute: the cost of a prompt on a replica that can fetch KV from another place.

    compute   Q          + w*P(tokens that the replica lacks)        + D + X
    fetch     max(Q, T)  + w*P(tokens that the source lacks as well) + D + X      T = latency + bytes / bandwidth

A transfer continues while the prompt waits for those before it, so only the excess of T over Q delays it. The
cheaper one counts. Transfers at one replica share its bandwidth. All functions are pure, as in `router/cost.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.base.structs import Struct
from router.cost import (
    DEFAULT_COST,
    Candidate,
    CostSettings,
    RouteQuery,
    Terms,
    cost,
    prefill_weight,
    queue_seconds,
    uncached_tokens,
)


class Source(Struct, frozen=True, gc=False):
    """A place from which the KV of a prompt's beginning can be read."""

    name: str
    """A replica, or a store of files."""
    tokens: int
    """Leading tokens of the prompt that it can give, including those that the reader has already."""
    bandwidth: float
    """Bytes/s of a single transfer. Above 0."""
    latency: float
    """Seconds until the first byte."""


class FetchQuery(RouteQuery, frozen=True, gc=False):
    """A prompt to place, and the places from which its KV can be fetched."""

    peers: Sequence[Source] = ()
    """Replicas that hold most of it. A replica does not fetch from itself."""
    files: Mapping[str, Source] | None = None
    """By replica, the files that it can read."""
    transfers: Mapping[str, int] | None = None
    """Transfers in progress at each replica; zeros may be omitted."""
    kv_bytes_per_token: float = 0.0


class Fetch(NamedTuple):
    """A fetch: its source, size and duration."""

    source: Source
    seconds: float
    """From now until all of it has arrived."""
    tokens: int
    """Tokens that are fetched."""


@dataclass(frozen=True, slots=True)
class FetchTerms(Terms):
    """A replica's cost for a prompt of which it fetches a part, in seconds."""

    fetch: float
    """Seconds by which the transfer outlasts the queue: the sixth term of the total."""
    source: str
    fetched_tokens: int


def fetch_or_compute(
    query: RouteQuery, replica: Candidate, settings: CostSettings = DEFAULT_COST
) -> Terms | FetchTerms:
    """Return the cost of `query` on `replica` when it does the cheaper of the two; computing wins ties.

    It is never more than `cost`, and never more with a faster link. Raises ValueError as `cost` does, and for a
    bandwidth that is not above 0.
    """
    terms = cost(query, replica, settings)
    fetch = best_fetch(query, replica, settings)
    if fetch is None:
        return terms
    beyond = max(fetch.seconds - terms.queue, 0.0)
    left = uncached_tokens(query.num_tokens, fetch.source.tokens)
    prefill = prefill_weight(query.utilisation, settings.max_weight) * left / replica.prefill_rate
    total = terms.queue + beyond + prefill + terms.load + terms.decode + terms.evict
    return FetchTerms(
        terms.queue,
        prefill,
        terms.decode,
        terms.evict,
        total,
        terms.overlap,
        terms.load,
        terms.below,
        beyond,
        fetch.source.name,
        fetch.tokens,
    )


def best_fetch(query: RouteQuery, replica: Candidate, settings: CostSettings = DEFAULT_COST) -> Fetch | None:
    """Return the fetch that `replica` should make for a prompt; None if computing costs no more. O(peers)."""
    if not isinstance(query, FetchQuery) or not (query.peers or query.files):
        return None
    own = query.files.get(replica.replica) if query.files else None
    sources = query.peers if own is None else (*query.peers, own)
    held = query.overlap.get(replica.replica, 0)
    queue = queue_seconds(replica)
    per_token = prefill_weight(query.utilisation, settings.max_weight) / replica.prefill_rate
    best, least = None, uncached_tokens(query.num_tokens, held) * per_token
    for source in sources:
        if source.tokens <= held or source.name == replica.replica:
            continue
        seconds = transfer_seconds(query, source, replica.replica, source.tokens - held)
        added = max(seconds - queue, 0.0) + uncached_tokens(query.num_tokens, source.tokens) * per_token
        if added < least:
            best, least = Fetch(source, seconds, source.tokens - held), added
    return best


def transfer_seconds(query: FetchQuery, source: Source, reader: str, num_tokens: int) -> float:
    """Return the seconds until so many tokens' KV has arrived, with equal shares for all transfers at either end.

    Raises ValueError for a bandwidth that is not above 0.
    """
    if not source.bandwidth > 0.0:
        raise ValueError(f"the bandwidth from {source.name} must be above 0 bytes/s, got {source.bandwidth}")
    busy = query.transfers or {}
    sharing = 1 + max(busy.get(source.name, 0), busy.get(reader, 0))
    return source.latency + num_tokens * query.kv_bytes_per_token * sharing / source.bandwidth
