"""The ages that are reported of evicted pages: true to the clock, sampled, and bounded."""

from __future__ import annotations

from cache import KVCacheManager, Namespace
from cache.figures.page_ages import EvictedPage, PageAges

NS = Namespace("m")


def hold(cache: KVCacheManager, tokens: list[int], now: float, until: float) -> None:
    """Run a request that computes `tokens` from `now` on and ends at `until`; they stay in the tree."""
    lease = cache.lock(cache.match(NS, tokens, now))
    cache.extend(lease, len(tokens), now)
    cache.finish(lease, tokens, until)


def test_an_evicted_page_has_lived_since_it_was_taken_and_idled_since_its_last_use() -> None:
    cache = KVCacheManager(4, page_size=4)
    hold(cache, list(range(8)), now=10.0, until=13.0)
    hold(cache, list(range(8)), now=20.0, until=21.0)  # found: the first page is used again
    hold(cache, list(range(100, 116)), now=50.0, until=51.0)  # wants every page
    # The second request took a page of its own for its last token, and gave it back.
    assert set(cache.page_ages.drain()) == {EvictedPage(lifetime=40.0, idle=29.0)}
    assert cache.page_ages.drain() == []


def test_pages_dropped_by_a_reset_or_given_back_uncomputed_are_no_evictions() -> None:
    cache = KVCacheManager(4, page_size=4)
    hold(cache, list(range(8)), now=1.0, until=2.0)
    assert cache.reset() == cache.stats.reset_pages == 2
    lease = cache.lock(cache.match(NS, [1, 2, 3], 3.0))
    cache.extend(lease, 16, 3.0)
    cache.finish(lease, [], 4.0)
    assert cache.page_ages.drain() == [] and cache.stats.evicted_pages == 0


def test_a_large_memory_is_sampled_and_the_record_is_bounded() -> None:
    ages = PageAges(200_000)
    ages.taken(range(200_000), 0.0)
    for _ in range(100):
        ages.evicted(range(200_000), 1.0, 3.0)
    drained = ages.drain()
    assert 512 <= len(drained) <= 4096 and set(drained) == {EvictedPage(3.0, 2.0)}
