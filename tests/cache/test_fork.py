"""Forks: a second lease that goes on where the first one is, and shares all whole pages with it."""

from __future__ import annotations

import pytest

from cache import KVCacheManager
from tests.cache.support.world import NAMESPACES, Client, World

PAGE_SIZES = (1, 3, 16)


def world(num_pages: int = 400, page_size: int = 3, *, prefix_cache: bool = True) -> World:
    return World(KVCacheManager(num_pages, page_size, prefix_cache=prefix_cache))


def go_on(w: World, client: Client, tokens: list[int]) -> None:
    """Tokens of its own: a fork's first page is the copy."""
    client.tokens.extend(tokens)
    w.compute(client, 1)
    w.compute(client, len(client.tokens))
    assert client.computed == len(client.tokens)
    w.check()
    w.check_locks()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_n_forks_of_a_prompt_take_its_pages_and_a_tail_each(page_size: int, prefix_cache: bool) -> None:
    w = world(4200, page_size, prefix_cache=prefix_cache)
    first = w.start(range(4001))
    forks = [w.fork(first, 4001) for _ in range(7)]
    num_prompt = -(-4001 // page_size)
    assert w.cache.account().locked + w.cache.account().private == num_prompt
    for index, client in enumerate([first, *forks]):
        client.tokens.append(5000 + index)
        w.compute(client, 1)
        w.compute(client, 1)
        assert client.computed == 4002
    w.check()
    has_tail = 4001 % page_size > 0
    assert w.cache.stats.copied_pages == (7 if has_tail else 0)
    assert w.cache.account().locked + w.cache.account().private == num_prompt + (7 if has_tail else 8)
    for client in [first, *forks]:
        w.end(client)
    assert w.cache.account().locked == w.cache.account().private == 0
    assert w.cache.account().free == 4200 or prefix_cache


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_first_may_end_before_its_forks(page_size: int, prefix_cache: bool) -> None:
    w = world(page_size=page_size, prefix_cache=prefix_cache)
    first = w.start(range(20))
    left, right = w.fork(first, 20), w.fork(first, 17)
    w.finish(first, 0)
    w.check()
    go_on(w, left, [50, 51])
    below = w.fork(left, 22)
    w.end(left)
    go_on(w, below, [52, 53])
    go_on(w, right, [60])
    w.end(right)
    w.end(below)
    assert (w.cache.account().evictable > 0) == prefix_cache
    w.cache.reset()
    assert w.cache.account().free == 400


def test_a_fork_of_less_than_was_inserted_shares_that_much() -> None:
    w = world()
    first = w.start(range(14))
    w.insert(first, 14)
    fork = w.fork(first, 7)
    assert (fork.lease.num_cached, fork.lease.partial, len(fork.lease.pages)) == (7, 1, 2)
    go_on(w, fork, [70, 71])
    go_on(w, first, [80, 81])


def test_a_fork_of_nothing_is_a_lease_of_its_own() -> None:
    w = world(prefix_cache=False)
    first = w.start([1, 2])
    fork = w.fork(first, 0)
    assert fork.lease.num_cached == 0 and fork.lease.pages == []
    fork.tokens.extend([1, 2])
    w.compute(fork, 2)
    w.check()


def test_forks_that_go_on_alike_meet_again_when_they_are_inserted() -> None:
    w = world()
    first = w.start(range(10))
    fork = w.fork(first, 10)
    for client in (first, fork):
        go_on(w, client, [20, 21, 22, 23])
    w.insert(first, 14)
    w.insert(fork, 14)
    w.check()
    assert fork.lease.pages[:4] == first.lease.pages[:4] and fork.lease.pages[4] != first.lease.pages[4]


def test_a_fork_that_finds_no_page_stays_as_it_was_and_can_do_without_the_copy() -> None:
    w = world(num_pages=4)
    first = w.start(range(10))
    fork = w.fork(first, 10)
    assert not w.extend(fork, 11)
    w.cache.drop_partial(fork.lease)
    assert fork.lease.num_cached == 9
    w.end(first)
    w.finish(fork, 0)
    w.check()
    assert w.cache.account().locked == w.cache.account().private == 0


def test_a_page_being_copied_does_not_change_hands_so_a_fork_may_hold_less() -> None:
    """`first` wrote on in the page in which its node ends; `other` went on alike in a copy and came first."""
    w = world(page_size=16)
    first = w.start(range(10))
    w.insert(first, 10)
    other = w.start([*range(10), 20, 21])
    w.insert(other, 12)
    go_on(w, first, [20, 21, 22])
    waiting = w.fork(first, 10)  # it will copy the page that `first` would have to give up
    fork = w.fork(first, 13)
    assert fork.lease.num_cached == 12
    w.check()
    go_on(w, waiting, [30])
    go_on(w, fork, [31])
    assert w.fork(first, 13).lease.num_cached == 13, "nobody copies any more"
    w.check()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_what_cannot_be_forked(prefix_cache: bool) -> None:
    w = world(prefix_cache=prefix_cache)
    client = w.start(range(5))
    with pytest.raises(ValueError, match="7 tokens cannot lie in 2 pages of 3 tokens"):
        w.cache.fork(client.lease, range(7), 1.0)
    w.fork(client, 5)
    with pytest.raises(ValueError, match="differ at 4"):
        w.cache.fork(client.lease, [0, 1, 2, 3, 9, 9], 1.0)
    w.end(client)
    with pytest.raises(ValueError, match="finished"):
        w.cache.fork(client.lease, range(5), 1.0)


def test_without_a_prefix_cache_forks_are_found_by_nobody_and_told_to_nobody() -> None:
    w = World(KVCacheManager(40, 3, prefix_cache=False, block_tokens=3))
    first = w.start(range(12))
    fork = w.fork(first, 12)
    assert w.cache.peek(NAMESPACES[0], range(13)) == 0 and w.cache.account().locked == 4
    other = w.start(range(12))
    twin = w.fork(other, 12)
    assert w.cache.account().locked == 8, "two groups of equal tokens share nothing"
    for client in (first, fork, twin, other):
        w.end(client)
    assert w.cache.account().free == 40 and not w.cache._tree._roots
    assert w.cache.prefix_log is not None and w.cache.prefix_log.drain() == ([], [])
