"""A bound that no placement exceeds by much: the hit rate of one cache as large as all replicas' together."""

from __future__ import annotations

from cache import KVCacheManager
from router.simulator.replica import LAST_TOKEN, NAMESPACE
from router.simulator.trace import Trace


def pooled_hit_rate(trace: Trace, cache_tokens: int) -> float:
    """Return the token hit rate of one LRU cache of `cache_tokens` that serves the trace in its order.

    It is not a strict bound, as LRU is not optimal, but what free transfer between replicas would give.
    """
    num_blocks = sum(len(request.blocks) for request in trace.requests)
    cache = KVCacheManager(max(min(cache_tokens // trace.block_tokens, num_blocks), 1), 1)
    num_hit = num_tokens = 0
    for time, request in enumerate(trace.requests):
        num_tokens += request.num_tokens
        match = cache.match(NAMESPACE, (*request.blocks, LAST_TOKEN), time)
        lease = cache.lock(match)
        num_hit += min(match.length * trace.block_tokens, request.num_tokens - 1)
        is_room = cache.pages_needed(lease, len(request.blocks)) <= cache.available
        if is_room:
            cache.extend(lease, len(request.blocks))
        cache.finish(lease, request.blocks if is_room else (), time)
    return num_hit / num_tokens
