"""The cache's log of stored and evicted blocks, compared with a walk over all that the tree holds."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache import KVCacheManager, Namespace, PrefixLog
from cache.news.recent_runs import MAX_RUNS, RecentRuns, newest_first
from cache.prefix_hash import block_hashes, prefix_root
from tests.cache.support.checked_cache import NAMESPACES, CheckedCache
from tests.cache.support.random_operations import RandomOperations


@dataclass
class Listener(CheckedCache):
    """A cache with a listener that hears every delta, and others that came later and began with a snapshot."""

    block_tokens: int = 4
    heard: set[int] = field(default_factory=set)
    newcomers: list[set[int]] = field(default_factory=list)

    @property
    def log(self) -> PrefixLog:
        assert self.cache.prefix_log is not None
        return self.cache.prefix_log

    def parents(self) -> dict[int, int]:
        """By brute force: every block that lies in the tree as a whole, and the one before it in its prefix."""
        parents: dict[int, int] = {}
        for namespace, root in self.cache.tree.roots.items():
            start = prefix_root(namespace)
            stack = [(root, list[int]())]
            while stack:
                node, tokens = stack.pop()
                tokens = tokens + list(node.tokens)
                chain = [start, *block_hashes(tokens, start, self.block_tokens)]
                parents.update(zip(chain[1:], chain, strict=False))
                stack.extend((child, tokens) for child in node.children.values())
        return parents

    def drain(self) -> None:
        stored, evicted = self.log.drain()
        assert len(set(stored)) == len(stored) and len(set(evicted)) == len(evicted)
        assert not self.heard & set(stored) and self.heard >= set(evicted)
        for known in (self.heard, *self.newcomers):
            known.difference_update(evicted)
            known.update(stored)
        parents = self.parents()
        assert self.heard == set(parents)
        snapshot = list(self.log.snapshot())
        for reported in (stored, snapshot):  # parents come first
            place = {block: position for position, block in enumerate(reported)}
            assert all(place.get(parents[block], -1) < position for block, position in place.items())

    def greet(self) -> None:
        """A new listener begins with a snapshot, at any time."""
        self.newcomers = [*self.newcomers[-2:], set(self.log.snapshot())]

    def reset(self) -> None:
        self.cache.reset()
        self.forget_evicted()

    def check_news(self) -> None:
        assert set(self.log.snapshot()) == self.heard
        assert all(newcomer == self.heard for newcomer in self.newcomers)


def listener(num_pages: int, page_size: int, block_tokens: int) -> Listener:
    return Listener(KVCacheManager(num_pages, page_size, block_tokens=block_tokens), block_tokens=block_tokens)


@settings(max_examples=48, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from((1, 3, 4, 16)),
    block_tokens=st.sampled_from((1, 3, 4, 16)),
    num_pages=st.integers(6, 60),
    drain_weight=st.sampled_from((1, 10, 100)),
)
def test_any_history_is_reported_as_it_was(
    seed: int, page_size: int, block_tokens: int, num_pages: int, drain_weight: int
) -> None:
    checked = listener(num_pages, page_size, block_tokens)
    driver = RandomOperations(checked, seed)
    driver.operations += [(checked.drain, drain_weight), (checked.greet, 5)]
    for _ in range(300):
        driver.step()
        checked.check_news()
    checked.check()
    driver.end()
    checked.cache.reset()
    checked.drain()
    assert not checked.heard


def test_a_block_is_stored_when_it_is_whole_and_evicted_when_it_is_not() -> None:
    checked = listener(num_pages=8, page_size=4, block_tokens=3)
    tokens = list(range(20))
    checked.serve(tokens)
    chain = block_hashes(tokens, prefix_root(NAMESPACES[0]), 3)
    assert checked.log.drain() == (chain, []) and len(chain) == 6
    checked.cache.evict(1)  # tokens 16 to 20: block 5 (15 to 18) is not whole any more
    assert checked.log.drain() == ([], [chain[5]])
    checked.cache.evict(1)  # tokens 12 to 16: block 4 (12 to 15)
    assert checked.log.drain() == ([], [chain[4]])


def test_a_leaf_that_goes_back_into_its_parent_takes_its_blocks_along() -> None:
    checked = listener(num_pages=2, page_size=8, block_tokens=2)
    checked.serve(range(6))
    checked.serve(range(50, 58))
    checked.drain()
    checked.now += 1
    # The match splits the first run inside its page. The split-off end is then the oldest, but owns no page:
    # it rejoins, and the second run is evicted.
    assert checked.cache.match(NAMESPACES[0], [0, 1, 2, 99], checked.now).length == 3
    checked.cache.evict(1)
    checked.drain()
    assert set(checked.log.snapshot()) == set(block_hashes(range(6), prefix_root(NAMESPACES[0]), 2))


def test_blocks_that_came_and_went_between_two_drains_are_not_reported() -> None:
    checked = listener(num_pages=8, page_size=4, block_tokens=4)
    checked.serve(range(8))
    checked.reset()
    assert checked.log.drain() == ([], [])
    checked.serve(range(8))
    checked.log.drain()
    checked.reset()
    checked.serve(range(12))
    stored, evicted = checked.log.drain()
    assert (len(stored), evicted) == (1, [])


def test_namespaces_have_nothing_in_common() -> None:
    checked = listener(num_pages=8, page_size=4, block_tokens=4)
    for namespace in NAMESPACES:
        checked.serve(range(8), namespace)
    stored, _ = checked.log.drain()
    assert len(set(stored)) == 6


def test_without_blocks_nothing_is_recorded() -> None:
    for block_tokens in (None, 0):
        assert KVCacheManager(8, 4, block_tokens=block_tokens).prefix_log is None
    with pytest.raises(ValueError, match="block_tokens"):
        KVCacheManager(8, 4, block_tokens=-1)


def test_a_publisher_in_another_thread_hears_it_all() -> None:
    """The loop changes the log while another thread drains it and takes snapshots."""
    log, draw, held, heard = PrefixLog(), random.Random(1), set[int](), set[int]()
    differences: list[set[int]] = []
    is_over = threading.Event()

    def publish() -> None:
        while not is_over.is_set():
            stored, evicted = log.drain()
            heard.difference_update(evicted)
            heard.update(stored)
            differences.append(set(log.snapshot()) ^ heard)

    publisher = threading.Thread(target=publish)
    publisher.start()
    for _ in range(3000):
        blocks = draw.sample(range(400), 20)
        log.evict(gone := [block for block in blocks if block in held])
        log.store(new := [block for block in blocks if block not in held])
        held.difference_update(gone)
        held.update(new)
    is_over.set()
    publisher.join()
    assert differences and not any(differences)
    stored, evicted = log.drain()
    assert (heard - set(evicted)) | set(stored) == held == set(log.snapshot())


def test_blocks_with_one_hash_do_no_harm() -> None:
    """Two prefixes collide: reports of that hash may be wrong, those of others are right."""
    log = PrefixLog()
    log.store([1, 2])
    log.store([1])
    log.drain()
    log.evict([1])
    assert log.drain() == ([], [1])
    log.evict([1])
    log.drain()
    assert list(log.snapshot()) == [2]


def test_a_snapshot_begins_with_the_most_recently_used_blocks() -> None:
    """After what precedes it in its prefix, and whatever was computed after it."""
    checked = listener(num_pages=64, page_size=4, block_tokens=4)
    system = list(range(8))
    for first in (100, 200, 300):
        checked.serve([*system, *range(first, first + 8)])
    checked.drain()
    checked.now += 1
    chain = block_hashes([*system, *range(200, 208)], prefix_root(NAMESPACES[0]), 4)
    assert checked.cache.match(NAMESPACES[0], [*system, *range(200, 204), 9], checked.now).length == 12
    told = list(checked.log.snapshot())
    assert told[:3] == chain[:3] and told[3] != chain[3]
    assert len(told) == 8 and set(told) == checked.heard


def test_blocks_evicted_while_a_snapshot_is_read_are_left_out_of_the_rest() -> None:
    checked = listener(num_pages=8, page_size=4, block_tokens=4)
    checked.serve(range(20))
    checked.drain()
    snapshot = checked.log.snapshot()
    chain = block_hashes(range(20), prefix_root(NAMESPACES[0]), 4)
    assert [next(snapshot), next(snapshot)] == chain[:2]
    checked.cache.evict(2)
    checked.drain()
    assert list(snapshot) == [chain[2]]


def test_the_record_of_recent_runs_is_bounded() -> None:
    recent = RecentRuns()
    for number in range(5 * MAX_RUNS):
        recent.use([(8, [2 * number, 1]), (0, [2 * number + 1])])
        assert len(recent.copy()) <= MAX_RUNS
    newest = newest_first(recent.copy())
    assert newest[:2] == [[10 * MAX_RUNS - 1], [10 * MAX_RUNS - 2, 1]]


def test_the_eviction_age_is_that_of_the_page_that_an_allocation_would_evict() -> None:
    cache = KVCacheManager(4, 4)
    assert cache.eviction_age(0.0) is None
    for number in range(2):
        lease = cache.lock(cache.match(Namespace("m"), [number] * 9, now=10.0 + number))
        cache.extend(lease, 8)
        cache.finish(lease, [number] * 8, now=10.0 + number)
    assert cache.eviction_age(15.0) == 5.0
    cache.match(Namespace("m"), [0] * 9, now=14.0)
    assert cache.eviction_age(15.0) == 4.0  # the other one is the oldest now
    held = cache.lock(cache.match(Namespace("m"), [1] * 9, now=14.5))
    assert cache.eviction_age(15.0) == 1.0
    also = cache.lock(cache.match(Namespace("m"), [0] * 9, now=14.5))
    assert cache.eviction_age(15.0) == 0.0
    for lease, number in ((held, 1), (also, 0)):
        cache.finish(lease, [number] * 8, now=16.0)
    assert cache.evict(1) == 1
    assert cache.eviction_age(15.0) is None


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.integers(0, 2**32), st.sampled_from((1, 4)), st.sampled_from(("lru", "lfu", "priority")))
def test_looking_at_the_age_changes_no_order(seed: int, page_size: int, eviction: str) -> None:
    """Two caches with one history, one of which is asked for its ages all the time: the same pages are evicted."""
    caches = [CheckedCache(KVCacheManager(20, page_size, eviction=eviction)) for _ in range(2)]
    drivers = [RandomOperations(checked, seed) for checked in caches]
    for _ in range(200):
        for driver in drivers:
            driver.step()
        ages = caches[0].cache.eviction_age(caches[0].now)
        assert ages is None or ages >= 0.0
        assert caches[0].held == caches[1].held
