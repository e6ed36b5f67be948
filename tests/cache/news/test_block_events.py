"""Events of blocks with their tokens: a mirror made of them knows what the cache holds, and nothing else."""

from __future__ import annotations

import threading
import tracemalloc
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache import KVCacheManager, Namespace
from cache.news.block_events import MAX_NOTES, BlockEvents, BlocksRemoved, BlocksStored
from cache.news.tier import Tier
from cache.prefix_hash import block_hashes, prefix_root
from tests.cache.support.block_mirror import Mirror, prefixes
from tests.cache.support.checked_cache import CheckedCache
from tests.cache.support.random_operations import RandomOperations

OPEN, SALTED = Namespace("m"), Namespace("m", "", "salt")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from((1, 3, 4)),
    block_tokens=st.sampled_from((1, 3, 4)),
    num_pages=st.integers(6, 60),
    drain_weight=st.sampled_from((1, 10, 100)),
    salted=st.booleans(),
    shares=st.booleans(),
)
def test_a_mirror_of_the_events_has_the_blocks_that_the_tree_holds(
    seed: int, page_size: int, block_tokens: int, num_pages: int, drain_weight: int, salted: bool, shares: bool
) -> None:
    checked = CheckedCache(KVCacheManager(num_pages, page_size, block_tokens=block_tokens))
    events, mirror = checked.cache.follow_blocks(salted), Mirror(block_tokens)
    if shares:
        checked.share([1] * (2 * page_size * block_tokens) if num_pages >= 4 * block_tokens else [1] * page_size)

    def check() -> None:
        mirror.read(events.drain())
        assert {mirror.prompts[block] for block in mirror.held[Tier.DEVICE]} == prefixes(
            checked.cache, block_tokens, salted
        )
        newcomer = Mirror(block_tokens)
        newcomer.read(events.snapshot())
        assert newcomer.held == mirror.held

    driver = RandomOperations(checked, seed)
    driver.operations.append((check, drain_weight))
    for _ in range(200):
        driver.step()
    check()
    driver.end()
    checked.cache.reset()
    check()
    assert events.drain() == []


def serve(cache: KVCacheManager, tokens: list[int], namespace: Namespace = OPEN) -> None:
    lease = cache.lock(cache.match(namespace, tokens, 0.0))
    cache.extend(lease, len(tokens))
    cache.finish(lease, tokens, 0.0)


def chain(tokens: Iterable[int], namespace: Namespace = OPEN) -> list[int]:
    return block_hashes(list(tokens), prefix_root(namespace), 4)


def test_blocks_have_their_tokens_and_the_block_before_them() -> None:
    cache = KVCacheManager(16, 4, block_tokens=4)
    events = cache.follow_blocks()
    serve(cache, list(range(10)))
    blocks = chain(range(16))
    assert events.drain() == [BlocksStored(Tier.DEVICE, blocks[:2], None, list(range(8)), "")]
    serve(cache, list(range(16)))
    assert events.drain() == [BlocksStored(Tier.DEVICE, blocks[2:], blocks[1], list(range(8, 16)), "")]


def test_a_salt_s_blocks_are_not_reported_unless_asked_for() -> None:
    for salted in (False, True):
        cache = KVCacheManager(16, 4, block_tokens=4)
        events = cache.follow_blocks(salted)
        serve(cache, [7] * 8, SALTED)
        told = events.drain()
        assert told == (
            [BlocksStored(Tier.DEVICE, chain([7] * 8, SALTED), None, [7] * 8, "salt")] if salted else []
        )
        cache.reset()
        assert bool(events.drain()) == salted


def test_blocks_after_a_shared_prefix_continue_it_under_each_salt() -> None:
    cache = KVCacheManager(16, 4, block_tokens=4)
    events = cache.follow_blocks(include_salted=True)
    serve(cache, list(range(8)))
    assert cache.share(OPEN, list(range(8))) == 8
    serve(cache, list(range(12)), SALTED)
    *_, stored = events.drain()
    assert isinstance(stored, BlocksStored)
    assert (stored.parent, stored.token_ids, stored.salt) == (chain(range(8))[1], list(range(8, 12)), "salt")


def test_tiers_are_told_apart_and_a_block_in_no_tier_is_forgotten() -> None:
    events = BlockEvents(2)
    events.store(OPEN, None, [11, 12], array("i", [1, 2, 3, 4, 5]))
    events.keep([12], Tier.HOST)
    events.keep([99], Tier.HOST)  # unknown: a salt's
    assert events.drain() == [
        BlocksStored(Tier.DEVICE, [11, 12], None, [1, 2, 3, 4], ""),
        BlocksStored(Tier.HOST, [12], 11, [3, 4], ""),
    ]
    events.evict([12])
    assert events.drain() == [BlocksRemoved(Tier.DEVICE, [12])]
    events.keep([12], Tier.FILE)
    events.drop([12], Tier.HOST)
    assert events.drain() == [
        BlocksRemoved(Tier.HOST, [12]),
        BlocksStored(Tier.FILE, [12], 11, [3, 4], ""),
    ]
    events.drop([12], Tier.FILE)
    events.evict([11])
    assert events.drain() == [BlocksRemoved(Tier.DEVICE, [11]), BlocksRemoved(Tier.FILE, [12]), None]
    events.keep([11, 12], Tier.HOST)
    assert events.drain() == [], "neither is known any more"


def test_a_block_that_was_stored_and_evicted_is_not_reported() -> None:
    events = BlockEvents(2)
    events.store(OPEN, None, [11], array("i", [1, 2]))
    events.evict([11])
    assert events.drain() == []
    events.keep([11], Tier.HOST)
    assert events.drain() == [], "it is not known any more"
    events.store(OPEN, None, [11], array("i", [1, 2]))
    events.drain()
    events.evict([11])
    events.store(OPEN, None, [11], array("i", [1, 2]))
    assert events.drain() == []


@contextmanager
def tracing() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def test_without_a_reader_the_record_of_stores_and_evictions_stays_small() -> None:
    events, tokens = BlockEvents(1), array("i", [1])
    with tracing():
        for number in range(6 * MAX_NOTES):
            events.store(OPEN, None, [number], tokens)
            events.evict([number])
        assert tracemalloc.get_traced_memory()[0] < 512 * MAX_NOTES


class SlowToRead(array):  # type: ignore[type-arg]
    """Tokens at which a reader stays until the test lets it go on."""

    def __init__(self, *_: Any) -> None:
        self.is_read, self.may_continue = threading.Event(), threading.Event()

    def __getitem__(self, key: Any) -> Any:
        self.is_read.set()
        assert self.may_continue.wait(60)
        return super().__getitem__(key)


def test_a_reader_that_is_at_work_never_holds_the_engine_up() -> None:
    events, tokens = BlockEvents(1), SlowToRead("i", [1])
    events.store(OPEN, None, [0], tokens)
    with ThreadPoolExecutor(2) as threads:
        drained = threads.submit(events.drain)
        try:
            assert tokens.is_read.wait(60)

            def engine() -> None:
                for number in range(1, 2 * MAX_NOTES):
                    events.store(OPEN, None, [number], array("i", [1]))

            threads.submit(engine).result(60)
            assert not drained.done()
        finally:
            tokens.may_continue.set()
        stored = drained.result(60)[0]
    assert isinstance(stored, BlocksStored) and stored.blocks[0] == 0


def test_a_cache_that_reports_no_blocks_cannot_be_followed() -> None:
    for options in ({"block_tokens": None}, {"block_tokens": 4, "prefix_cache": False}):
        with pytest.raises(ValueError, match="block_tokens"):
            KVCacheManager(8, 4, **options).follow_blocks()
