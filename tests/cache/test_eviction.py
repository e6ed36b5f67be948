"""What goes first, how much of it, and at what cost."""

from __future__ import annotations

import pytest

from cache import KVCacheManager
from cache.eviction import LeastRecentlyUsed
from cache.node import Node
from tests.cache.support.world import NAMESPACES, World

A, B, C = [1] * 8, [2] * 8, [3] * 8


def held(w: World, *prompts: list[int]) -> list[bool]:
    return [w.cache.peek(NAMESPACES[0], [*prompt, 0]) == len(prompt) for prompt in prompts]


def world(eviction: str, num_pages: int = 20) -> World:
    return World(KVCacheManager(num_pages, 4, eviction=eviction))


def test_lru_drops_what_was_not_used_for_the_longest_time() -> None:
    w = world("lru")
    for prompt in (A, B, C, A):
        w.serve(prompt)
    w.cache.evict(2)
    assert held(w, A, B, C) == [True, False, True]


def test_what_a_waiting_request_matched_is_as_good_as_used() -> None:
    w = world("lru")
    w.serve(A)
    w.serve(B)
    w.cache.match(NAMESPACES[0], [*A, 0], 99.0)
    w.cache.evict(2)
    assert held(w, A, B) == [True, False]


def test_lfu_drops_what_was_reused_least() -> None:
    w = world("lfu")
    for prompt in (A, A, B, B, B, C, A):
        w.serve(prompt)
    w.cache.evict(2)
    assert held(w, A, B, C) == [True, True, False]


def test_waiting_requests_that_are_matched_again_and_again_are_not_reuse() -> None:
    w = world("lfu")
    for prompt in (A, B, B):
        w.serve(prompt)
    for _ in range(10):
        lease = w.cache.lock(w.cache.match(NAMESPACES[0], A, w.now))
        w.cache.finish(lease, [], w.now)
    w.cache.evict(2)
    assert held(w, A, B) == [False, True]


def test_priority_drops_what_only_low_priorities_used() -> None:
    cache = KVCacheManager(20, 4, eviction="priority")
    for prompt, priority in ((A, 5), (B, 0), (C, 0), (C, 3)):
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

    w = World(KVCacheManager(20, 4, eviction=Longest()))
    w.serve(A)
    w.serve([2] * 12)
    w.cache.evict(3)
    assert held(w, A, [2] * 12) == [True, False]


def test_an_unknown_strategy_names_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="'fifo'; known are lfu, lru, priority"):
        KVCacheManager(20, 4, eviction="fifo")


def test_no_more_is_dropped_than_is_needed() -> None:
    """A leaf gives pages from its end; what is left of it is still found, up to the page border."""
    w = world("lru")
    w.serve(range(30))
    assert w.cache.evict(3) == 3
    w.forget_evicted()
    w.check()
    assert w.cache.peek(NAMESPACES[0], range(31)) == 20


def test_a_prefix_outlives_what_follows_it() -> None:
    w = world("lru")
    w.serve([*range(8), 50, 51, 52])
    w.serve([*range(8), 60, 61, 62])
    w.cache.evict(2)
    assert w.cache.peek(NAMESPACES[0], range(9)) == 8


def test_running_requests_lose_nothing_and_the_rest_can_be_taken_to_the_last_page() -> None:
    w = world("lru", num_pages=10)
    a = w.start(range(8))
    w.insert(a, 8)
    w.serve([*range(4), 50, 51, 52, 53, 54])
    assert w.cache.account() == (6, 2, 2, 0)
    b = w.start(range(100, 132))
    assert w.cache.account() == (0, 0, 2, 8) and w.cache.stats.evicted_pages == 2
    w.end(b)
    w.end(a)


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
