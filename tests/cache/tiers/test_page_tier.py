"""Pages in a larger memory, of prompts that part inside a page."""

from __future__ import annotations

from cache.news.prefix_log import PrefixLog
from cache.news.tier import Tier
from cache.tiers.page_tier import PageTier


def test_a_block_in_two_pages_is_there_until_both_are_gone() -> None:
    log = PrefixLog()
    tier = PageTier(log)
    log.store([1, 2, 3])
    tier.add(b"a page", 0, [1, 2])
    tier.add(b"another one", 1, [1, 3])
    tier.settle([0, 1])
    log.evict([3, 2, 1])
    log.drain()
    log.drain_moves()
    assert dict(zip([1, 2, 3], log.tiers([1, 2, 3]), strict=True)) == dict.fromkeys([1, 2, 3], Tier.HOST)

    assert tier.reclaim() == [0]
    assert log.drain() == ([], [2])
    assert tier.reclaim() == [1]
    stored, gone = log.drain()
    assert not stored and sorted(gone) == [1, 3]
