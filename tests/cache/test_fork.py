"""Forks: a second lease that goes on where the first one is, and shares all whole pages with it."""

from __future__ import annotations

import pytest

from cache import KVCacheManager
from tests.cache.support.checked_cache import NAMESPACES, CheckedCache, Client

PAGE_SIZES = (1, 3, 16)


def checked_cache(num_pages: int = 400, page_size: int = 3, *, prefix_cache: bool = True) -> CheckedCache:
    return CheckedCache(KVCacheManager(num_pages, page_size, prefix_cache=prefix_cache))


def continue_with(checked: CheckedCache, client: Client, tokens: list[int]) -> None:
    """Compute tokens of the client's own: a fork's first page is the copy."""
    client.tokens.extend(tokens)
    checked.compute(client, 1)
    checked.compute(client, len(client.tokens))
    assert client.computed == len(client.tokens)
    checked.check()
    checked.check_locks()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_n_forks_of_a_prompt_take_its_pages_and_a_tail_each(page_size: int, prefix_cache: bool) -> None:
    checked = checked_cache(4200, page_size, prefix_cache=prefix_cache)
    first = checked.start(range(4001))
    forks = [checked.fork(first, 4001) for _ in range(7)]
    num_prompt = -(-4001 // page_size)
    assert checked.cache.account().locked + checked.cache.account().private == num_prompt
    for index, client in enumerate([first, *forks]):
        client.tokens.append(5000 + index)
        checked.compute(client, 1)
        checked.compute(client, 1)
        assert client.computed == 4002
    checked.check()
    has_tail = 4001 % page_size > 0
    assert checked.cache.stats.copied_pages == (7 if has_tail else 0)
    assert checked.cache.account().locked + checked.cache.account().private == num_prompt + (7 if has_tail else 8)
    for client in [first, *forks]:
        checked.end(client)
    assert checked.cache.account().locked == checked.cache.account().private == 0
    assert checked.cache.account().free == 4200 or prefix_cache


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_first_may_end_before_its_forks(page_size: int, prefix_cache: bool) -> None:
    checked = checked_cache(page_size=page_size, prefix_cache=prefix_cache)
    first = checked.start(range(20))
    left, right = checked.fork(first, 20), checked.fork(first, 17)
    checked.finish(first, 0)
    checked.check()
    continue_with(checked, left, [50, 51])
    below = checked.fork(left, 22)
    checked.end(left)
    continue_with(checked, below, [52, 53])
    continue_with(checked, right, [60])
    checked.end(right)
    checked.end(below)
    assert (checked.cache.account().evictable > 0) == prefix_cache
    checked.cache.reset()
    assert checked.cache.account().free == 400


def test_a_fork_of_less_than_was_inserted_shares_that_much() -> None:
    checked = checked_cache()
    first = checked.start(range(14))
    checked.insert(first, 14)
    fork = checked.fork(first, 7)
    assert (fork.lease.num_cached, fork.lease.partial, len(fork.lease.pages)) == (7, 1, 2)
    continue_with(checked, fork, [70, 71])
    continue_with(checked, first, [80, 81])


def test_a_fork_of_nothing_is_a_lease_of_its_own() -> None:
    checked = checked_cache(prefix_cache=False)
    first = checked.start([1, 2])
    fork = checked.fork(first, 0)
    assert fork.lease.num_cached == 0 and fork.lease.pages == []
    fork.tokens.extend([1, 2])
    checked.compute(fork, 2)
    checked.check()


def test_forks_with_the_same_continuation_merge_when_they_are_inserted() -> None:
    checked = checked_cache()
    first = checked.start(range(10))
    fork = checked.fork(first, 10)
    for client in (first, fork):
        continue_with(checked, client, [20, 21, 22, 23])
    checked.insert(first, 14)
    checked.insert(fork, 14)
    checked.check()
    assert fork.lease.pages[:4] == first.lease.pages[:4] and fork.lease.pages[4] != first.lease.pages[4]


def test_a_fork_that_finds_no_page_stays_as_it_was_and_can_do_without_the_copy() -> None:
    checked = checked_cache(num_pages=4)
    first = checked.start(range(10))
    fork = checked.fork(first, 10)
    assert not checked.extend(fork, 11)
    checked.cache.drop_partial(fork.lease)
    assert fork.lease.num_cached == 9
    checked.end(first)
    checked.finish(fork, 0)
    checked.check()
    assert checked.cache.account().locked == checked.cache.account().private == 0


def test_a_page_being_copied_does_not_change_hands_so_a_fork_may_hold_less() -> None:
    """`first` wrote on in the page in which its node ends; `other` went on alike in a copy and came first."""
    checked = checked_cache(page_size=16)
    first = checked.start(range(10))
    checked.insert(first, 10)
    other = checked.start([*range(10), 20, 21])
    checked.insert(other, 12)
    continue_with(checked, first, [20, 21, 22])
    waiting = checked.fork(first, 10)  # it will copy the page that `first` would have to give up
    fork = checked.fork(first, 13)
    assert fork.lease.num_cached == 12
    checked.check()
    continue_with(checked, waiting, [30])
    continue_with(checked, fork, [31])
    assert checked.fork(first, 13).lease.num_cached == 13, "no fork copies any more"
    checked.check()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_fork_of_other_tokens_or_of_a_finished_lease_is_refused(prefix_cache: bool) -> None:
    checked = checked_cache(prefix_cache=prefix_cache)
    client = checked.start(range(5))
    with pytest.raises(ValueError, match="7 tokens cannot lie in 2 pages of 3 tokens"):
        checked.cache.fork(client.lease, range(7), 1.0)
    checked.fork(client, 5)
    with pytest.raises(ValueError, match="differ from them at 4"):
        checked.cache.fork(client.lease, [0, 1, 2, 3, 9, 9], 1.0)
    checked.end(client)
    with pytest.raises(ValueError, match="finished"):
        checked.cache.fork(client.lease, range(5), 1.0)


def test_without_a_prefix_cache_forks_are_neither_found_nor_reported() -> None:
    checked = CheckedCache(KVCacheManager(40, 3, prefix_cache=False, block_tokens=3))
    first = checked.start(range(12))
    fork = checked.fork(first, 12)
    assert checked.cache.peek(NAMESPACES[0], range(13)) == 0 and checked.cache.account().locked == 4
    other = checked.start(range(12))
    twin = checked.fork(other, 12)
    assert checked.cache.account().locked == 8, "two groups of equal tokens share nothing"
    for client in (first, fork, twin, other):
        checked.end(client)
    assert checked.cache.account().free == 40 and not checked.cache.tree.roots
    assert checked.cache.prefix_log is not None and checked.cache.prefix_log.drain() == ([], [])
