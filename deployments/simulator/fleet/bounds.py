"""Bounds that no placement exceeds by much: the hits of one cache of the fleet's size, and the shortest waits."""

from __future__ import annotations

from collections.abc import Iterator

from cache import KVCacheManager
from deployments.simulator.fleet.replica import LAST_TOKEN, NAMESPACE
from deployments.simulator.fleet.result import percentile
from deployments.simulator.fleet.service import ServiceModel
from deployments.simulator.fleet.trace import Trace


def pooled_hit_rate(trace: Trace, cache_tokens: int) -> float:
    """Return the token hit rate of one LRU cache of `cache_tokens` that serves the trace in its order.

    It is not a strict bound, because LRU is not optimal, but the result of free transfers between replicas.
    """
    return sum(_hits(trace, cache_tokens)) / trace.num_prompt_tokens


def ttft_without_queue(trace: Trace, service: ServiceModel, share: float) -> float:
    """Return a percentile of the seconds that prompts take to compute when no KV that was ever computed is lost
    and no prompt waits: the part that remains however KV is kept and moved.
    """
    hits = _hits(trace, 2**60)
    lasting = (request.num_tokens - hit for request, hit in zip(trace.requests, hits, strict=True))
    return percentile(sorted(map(service.prefill_seconds, lasting)), share)


def _hits(trace: Trace, cache_tokens: int) -> Iterator[int]:
    """Yield the tokens of each prompt that one LRU cache finds."""
    num_blocks = sum(len(request.blocks) for request in trace.requests)
    cache = KVCacheManager(max(min(cache_tokens // trace.block_tokens, num_blocks), 1), 1)
    for time, request in enumerate(trace.requests):
        match = cache.match(NAMESPACE, (*request.blocks, LAST_TOKEN), time)
        lease = cache.lock(match)
        yield min(match.length * trace.block_tokens, request.num_tokens - 1)
        is_room = cache.pages_needed(lease, len(request.blocks)) <= cache.available
        if is_room:
            cache.extend(lease, len(request.blocks))
        cache.finish(lease, request.blocks if is_room else (), time)
