"""Trees as deep, keys as long and nodes as broad as they get: no recursion, nothing quadratic.

Work is bounded by counting the tokens that the cache reads, not by the clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import pytest

from cache import KVCacheManager, Namespace
from cache.node import Node

NS = Namespace("m")


class Prefix(Sequence[int]):
    """The tokens 0 .. length - 1, with a count of those that were looked at."""

    read = 0

    def __init__(self, length: int) -> None:
        self._tokens = range(length)

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        found = self._tokens[index]
        Prefix.read += 1 if isinstance(found, int) else len(found)
        return found


@pytest.fixture(autouse=True)
def nothing_read() -> None:
    Prefix.read = 0


def chain(num_nodes: int) -> KVCacheManager:
    """Two requests with the same tokens take turns, each one token further: every insert adds a node."""
    cache = KVCacheManager(num_nodes + 2, 1)
    leases = [cache.lock(cache.match(NS, Prefix(num_nodes), 0.0)) for _ in range(2)]
    for length in range(1, num_nodes + 1):
        lease = leases[length % 2]
        cache.extend(lease, length)
        cache.insert(lease, Prefix(length), float(length))
    for lease in leases:
        cache.finish(lease, Prefix(num_nodes - 1), float(num_nodes))
    return cache


def test_4_a_chain_of_100_000_nodes_is_built_found_locked_and_evicted() -> None:
    cache = chain(100_000)
    assert Prefix.read < 10 * 100_000  # each insert begins where the last one ended
    assert cache.account().evictable == 100_000
    match = cache.match(NS, Prefix(100_001), 1e6)
    depth, node = 0, match.node
    while node is not None and node.parent is not None:
        depth, node = depth + 1, node.parent
    assert match.length == 100_000 and depth > 99_000
    lease = cache.lock(match)
    assert len(lease.pages) == 100_000 and cache.account().locked == 100_000
    cache.finish(lease, [], 1e6)
    assert cache.evict(50_000) == 50_000
    assert cache.peek(NS, Prefix(100_001)) == 50_000
    assert cache.reset() == 50_000


def test_a_key_of_a_million_tokens_goes_in_by_chunks() -> None:
    cache = KVCacheManager(62_501, 16)
    lease = cache.lock(cache.match(NS, Prefix(1_000_000), 0.0))
    for stop in range(2048, 1_002_048, 2048):
        stop = min(stop, 1_000_000)
        cache.extend(lease, stop)
        cache.insert(lease, Prefix(stop), float(stop))
    assert Prefix.read < 1_010_000  # every token once, not once for each chunk
    cache.finish(lease, Prefix(1_000_000), 2e6)
    assert cache.account() == (1, 62_500, 0, 0, 0)
    assert cache.match(NS, Prefix(1_000_000), 3e6).length == 999_999
    assert Prefix.read < 4_000_000
    assert cache.evict(100) == 100 and cache.peek(NS, Prefix(1_000_000)) == 998_400


def test_many_chunked_requests_with_one_prompt_read_it_once_each() -> None:
    cache = KVCacheManager(20_000, 16)
    leases = [cache.lock(cache.match(NS, Prefix(100_000), 0.0)) for _ in range(3)]
    for stop in range(1000, 101_000, 1000):
        for lease in leases:
            cache.extend(lease, stop)
            cache.insert(lease, Prefix(stop), float(stop))
    assert Prefix.read < 3 * 2 * 100_000
    assert cache.account() == (20_000 - 6250, 0, 6250, 0, 0)


def test_a_match_reads_no_more_than_it_finds() -> None:
    """A waiting prompt of a million tokens is matched again and again; only what is held costs time."""
    cache = chain(10)
    for _ in range(100):
        assert cache.peek(NS, Prefix(1_000_000)) == 10
    assert Prefix.read < 20_000


def test_keys_that_diverge_one_token_deeper_each() -> None:
    cache = KVCacheManager(20_000, 4)
    for depth in range(1, 800):
        tokens = [*range(depth), -1]
        lease = cache.lock(cache.match(NS, tokens, float(depth)))
        assert lease.num_cached == depth - 1
        cache.extend(lease, depth + 1)
        cache.release_copy(lease)
        cache.finish(lease, tokens, float(depth))
    assert cache.peek(NS, range(3000)) == 799
    cache.reset()
    assert cache.account().free == 20_000


def test_4_a_node_with_20_000_children_loses_one_in_no_time() -> None:
    cache = KVCacheManager(20_001, 1)
    for token in range(20_000):
        lease = cache.lock(cache.match(NS, [7, token], 1.0))
        cache.extend(lease, 2)
        cache.finish(lease, [7, token], 1.0)
    assert cache.evict(19_999) == 19_999
    assert cache.account() == (19_999, 2, 0, 0, 0)


class Looked(dict[int, Node]):
    """A node's children, with a count of those that were looked at one after the other."""

    count = 0

    def values(self) -> Any:
        return LookedAt(super().values())


class LookedAt:
    def __init__(self, nodes: Any) -> None:
        self._nodes = list(nodes)

    def __iter__(self) -> Iterator[Node]:
        for node in self._nodes:
            Looked.count += 1
            yield node

    def __reversed__(self) -> Iterator[Node]:
        return iter(LookedAt(self._nodes[::-1]))


def test_branches_inside_one_page_are_not_all_visited_when_one_is_added_or_removed() -> None:
    cache = KVCacheManager(4000, 16)

    def serve(last: int) -> None:
        tokens = [*range(40), last, 1]
        lease = cache.lock(cache.match(NS, tokens, 1.0))
        cache.extend(lease, len(tokens))
        cache.release_copy(lease)
        cache.finish(lease, tokens, 1.0)

    for last in range(1000, 2000):
        serve(last)
    common = cache.tree.find_root(NS)
    while common is not None and common.end < 40:
        (common,) = common.children.values()
    assert common is not None and len(common.children) == 1000
    common.children, Looked.count = Looked(common.children), 0
    for last in range(2000, 2100):
        serve(last)
    assert cache.evict(1000) == 1000
    assert Looked.count < 3 * 1100
