"""Eviction: which pages are evicted first, how many of them, and at what cost."""

from __future__ import annotations

import pytest

from cache import KVCacheManager
from cache.eviction import LeastRecentlyUsed
from cache.node import Node
from tests.cache.support.checked_cache import NAMESPACES, CheckedCache

A, B, C = [1] * 8, [2] * 8, [3] * 8


def held(checked: CheckedCache, *prompts: list[int]) -> list[bool]:
    return [checked.cache.peek(NAMESPACES[0], [*prompt, 0]) == len(prompt) for prompt in prompts]


def checked_cache(eviction: str, num_pages: int = 20) -> CheckedCache:
    return CheckedCache(KVCacheManager(num_pages, 4, eviction=eviction))


def test_lru_evicts_the_least_recently_used_prefix() -> None:
    checked = checked_cache("lru")
    for prompt in (A, B, C, A):
        checked.serve(prompt)
    checked.cache.evict(2)
    assert held(checked, A, B, C) == [True, False, True]


def test_a_prefix_that_a_waiting_request_matched_counts_as_used() -> None:
    checked = checked_cache("lru")
    checked.serve(A)
    checked.serve(B)
    checked.cache.match(NAMESPACES[0], [*A, 0], 99.0)
    checked.cache.evict(2)
    assert held(checked, A, B) == [True, False]


def test_lfu_evicts_the_least_reused_prefix() -> None:
    checked = checked_cache("lfu")
    for prompt in (A, A, B, B, B, C, A):
        checked.serve(prompt)
    checked.cache.evict(2)
    assert held(checked, A, B, C) == [True, True, False]


def test_waiting_requests_that_are_matched_again_and_again_are_not_reuse() -> None:
    checked = checked_cache("lfu")
    for prompt in (A, B, B):
        checked.serve(prompt)
    for _ in range(10):
        lease = checked.cache.lock(checked.cache.match(NAMESPACES[0], A, checked.now))
        checked.cache.finish(lease, [], checked.now)
    checked.cache.evict(2)
    assert held(checked, A, B) == [False, True]


def test_priority_evicts_prefixes_that_only_less_urgent_requests_used() -> None:
    cache = KVCacheManager(20, 4, eviction="priority")
    for prompt, priority in ((A, -5), (B, 0), (C, 0), (C, -3)):
        lease = cache.lock(cache.match(NAMESPACES[0], prompt, 1.0), priority=priority)
        cache.extend(lease, 8)
        cache.release_copy(lease)
        cache.finish(lease, prompt, 1.0)
    cache.evict(2)
    assert cache.peek(NAMESPACES[0], [*B, 0]) == 0
    cache.evict(2)
    assert cache.peek(NAMESPACES[0], [*C, 0]) < 8 and cache.peek(NAMESPACES[0], [*A, 0]) == 8


def test_a_strategy_of_one_s_own_needs_one_method() -> None:
    class Longest:
        def key(self, node: Node) -> tuple[float, ...]:
            return (-len(node.tokens),)

    checked = CheckedCache(KVCacheManager(20, 4, eviction=Longest()))
    checked.serve(A)
    checked.serve([2] * 12)
    checked.cache.evict(3)
    assert held(checked, A, [2] * 12) == [True, False]


def test_an_unknown_strategy_names_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="'fifo'; known are lfu, lru, priority"):
        KVCacheManager(20, 4, eviction="fifo")


def test_no_more_is_dropped_than_is_needed() -> None:
    """A leaf gives pages from its end; what is left of it is still found, up to the page border."""
    checked = checked_cache("lru")
    checked.serve(range(30))
    assert checked.cache.evict(3) == 3
    checked.forget_evicted()
    checked.check()
    assert checked.cache.peek(NAMESPACES[0], range(31)) == 20


def test_a_prefix_outlives_its_continuations() -> None:
    checked = checked_cache("lru")
    checked.serve([*range(8), 50, 51, 52])
    checked.serve([*range(8), 60, 61, 62])
    checked.cache.evict(2)
    assert checked.cache.peek(NAMESPACES[0], range(9)) == 8


def test_running_requests_lose_nothing_and_the_rest_can_be_taken_to_the_last_page() -> None:
    checked = checked_cache("lru", num_pages=10)
    a = checked.start(range(8))
    checked.insert(a, 8)
    checked.serve([*range(4), 50, 51, 52, 53, 54])
    assert checked.cache.account() == (6, 2, 2, 0, 0)
    b = checked.start(range(100, 132))
    assert checked.cache.account() == (0, 0, 2, 8, 0) and checked.cache.stats.evicted_pages == 2
    checked.end(b)
    checked.end(a)


class CountingLru(LeastRecentlyUsed):
    def __init__(self) -> None:
        self.calls = 0

    def key(self, node: Node) -> tuple[float, ...]:
        self.calls += 1
        return super().key(node)


def test_evicting_a_few_pages_looks_at_a_few_nodes_of_many() -> None:
    strategy = CountingLru()
    cache = KVCacheManager(40_000, 1, eviction=strategy)
    for token in range(20_000):
        lease = cache.lock(cache.match(NAMESPACES[0], [token, 0], float(token)))
        cache.extend(lease, 2)
        cache.finish(lease, [token, 0], float(token))
    strategy.calls = 0
    assert cache.evict(40) == 40
    assert strategy.calls < 200
