"""Bugs that other engines had in their prefix caches, a test for each: a test's number is that of the bug.

1 views overwritten later, memory kept by slices; 2 locks and matches that skip nodes; 3 pages taken for tokens;
4 recursion, slow removal (see test_deep); 5 generated tokens lost; 6 freed while in use, freed twice; 7 leaks of
aborts and chunks; 8 inflated hit counts; 9 splits taken for removals, empty matches shared; 10 pins that outlive
their request; 11 shared pages counted twice.
"""

from __future__ import annotations

import sys

import pytest

from cache import KVCacheManager
from tests.cache.support.checked_cache import NAMESPACES, checked_cache

NS = NAMESPACES[0]


def test_1_the_tree_keeps_no_view_of_the_request_s_tokens_or_page_table() -> None:
    checked = checked_cache()
    tokens = list(range(12))
    lease = checked.cache.lock(checked.cache.match(NS, tokens, 1.0))
    checked.cache.extend(lease, 12)
    checked.cache.insert(lease, tokens, 1.0)
    pages = list(lease.pages)
    tokens[:] = [0] * 12
    lease.pages[:] = [0] * 3
    assert checked.cache.peek(NS, range(13)) == 12
    assert checked.cache.lock(checked.cache.match(NS, range(13), 1.0)).pages == pages


def test_1_a_split_leaves_neither_part_with_the_memory_of_both() -> None:
    checked = checked_cache(num_pages=2000)
    checked.serve(range(8000))
    checked.cache.match(NS, [0, 1, 2, 3, 0, 0], 9.0)
    upper, lower = [node for node, _ in checked.paths() if node.tokens]
    assert (len(upper.tokens), len(lower.tokens)) == (4, 7996)
    assert sys.getsizeof(upper.tokens) < 200 and sys.getsizeof(upper.pages) < 200


def test_2_a_lock_holds_the_matched_node_itself_as_well_as_those_above() -> None:
    checked = checked_cache()
    checked.serve(range(8))
    checked.serve([*range(8), 50, 51, 52, 53])
    lease = checked.cache.lock(checked.cache.match(NS, [*range(8), 50, 51, 52, 53, 0], 9.0))
    assert lease.num_cached == 12 and checked.cache.evict(3) == 0
    checked.cache.finish(lease, [], 9.0)
    assert checked.cache.evict(3) == 3


def test_2_a_match_continues_through_many_nodes() -> None:
    checked = checked_cache()
    for length in range(4, 44, 4):
        checked.serve(range(length))
        checked.serve([*range(length), 99])
    match = checked.cache.match(NS, range(50), 99.0)
    assert match.length == 40 and checked.cache.lock(match).num_shared == 10


def test_3_eviction_counts_in_pages() -> None:
    checked = checked_cache(page_size=16)
    checked.serve(range(64))
    assert checked.cache.evict(1) == 1
    assert checked.cache.account() == (61, 3, 0, 0, 0) and checked.cache.peek(NS, range(65)) == 48


def test_3_keys_shorter_than_a_page_and_empty_ones_are_keys_like_others() -> None:
    checked = checked_cache(page_size=16)
    assert checked.cache.match(NS, [], 0.0).length == checked.cache.match(NS, [1], 0.0).length == 0
    checked.serve([1, 2, 3])
    assert checked.serve([1, 2, 3, 4]) == 3
    client = checked.start([7, 8])
    checked.finish(client, 0)
    assert checked.cache.account().private == 0 and checked.cache.peek(NS, [7, 8, 9]) == 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_3_a_retracted_request_leaks_nothing(page_size: int) -> None:
    checked = checked_cache(page_size=page_size)
    client = checked.start(range(18))
    checked.insert(client, 9)
    checked.finish(client, client.computed)
    checked.check_locks()
    assert checked.cache.peek(NS, range(19)) == 18
    checked.cache.reset()
    assert checked.cache.account() == (64, 0, 0, 0, 0)


def test_5_generated_tokens_are_found_by_the_next_turn() -> None:
    checked = checked_cache()
    client = checked.start(range(9))
    checked.insert(client, 9)
    for token in (60, 61, 62):
        checked.continue_with(client, [token])
    checked.end(client)
    assert checked.serve([*range(9), 60, 61, 62, 100, 101]) == 12


def test_6_a_step_in_flight_keeps_the_page_it_writes() -> None:
    """Step N+1 was given the page table before step N's results were inserted: its page must stay where it is."""
    checked = checked_cache()
    other = checked.start(range(10))
    checked.insert(other, 10)
    client = checked.start(range(10))
    checked.cache.extend(client.lease, 11)
    in_flight = list(client.lease.pages)
    checked.insert(client, 10)  # its whole pages become the tree's
    assert client.lease.pages[10 // 4 :] == in_flight[10 // 4 :]
    checked.continue_with(client, [77])
    checked.end(client)
    checked.end(other)


def test_6_a_finished_request_is_not_freed_again() -> None:
    """Retracted, admitted again, finished; a late second finish of either lease is an error, not a double free."""
    checked = checked_cache(num_pages=8)
    client = checked.start(range(18))
    checked.finish(client, client.computed)
    again = checked.start(range(18))
    assert again.lease.num_cached == 17
    checked.end(again)
    for late in (client.lease, again.lease):
        with pytest.raises(ValueError, match="finished"):
            checked.cache.finish(late, list(range(18)), 9.0)
        with pytest.raises(ValueError, match="finished"):
            checked.cache.extend(late, 40)
    checked.check()
    assert checked.cache.account() == (3, 5, 0, 0, 0)


@pytest.mark.parametrize("stage", range(6))
def test_7_an_abort_leaks_nothing_at_any_stage(stage: int) -> None:
    checked = checked_cache()
    checked.serve(range(10))
    lease = checked.cache.lock(checked.cache.match(NS, [*range(10), 50, 51, 52], 9.0))
    if stage >= 1:
        copies = checked.cache.extend(lease, 11)
        assert len(copies) == 1  # stage 1: aborted while the copy is under way
    if stage >= 2:
        checked.cache.release_copy(lease)
    kept = list(range(10)) if stage >= 3 else []
    if stage >= 4:
        checked.cache.insert(lease, [*range(10), 50], 9.0)
    if stage == 5:
        checked.cache.extend(lease, 40)  # pages ahead of what is computed
    checked.cache.finish(lease, kept, 9.0)
    assert checked.cache.account()[2:] == (0, 0, 0)
    assert checked.cache.account().total == 64
    checked.cache.reset()
    assert checked.cache.account() == (64, 0, 0, 0, 0)


def test_7_chunks_leak_nothing_whatever_else_is_inserted_in_between() -> None:
    checked = checked_cache()
    prompt = list(range(30))
    clients = [checked.admit(NS, prompt) for _ in range(3)]
    for stop in range(5, 35, 5):
        for client in clients:
            assert client is not None
            checked.compute(client, 5)
            assert client.computed == stop
            checked.insert(client, stop)
            checked.check()
            checked.check_locks()
    assert checked.cache.account().private == 2  # 30 tokens fill 7 pages and a half
    for client in clients:
        assert client is not None
        checked.end(client)
    assert checked.cache.account() == (56, 8, 0, 0, 0)


def test_8_hits_are_counted_at_admission_and_nowhere_else() -> None:
    """Neither matches of a waiting request nor its chunks' meeting its own earlier chunks count as hits."""
    checked = checked_cache()
    for _ in range(5):
        checked.cache.match(NS, range(20), 0.0)
        checked.cache.peek(NS, range(20))
    client = checked.admit(NS, list(range(20)))
    assert client is not None
    for _ in range(5):
        checked.compute(client, 4)
        checked.insert(client, client.computed)
    checked.end(client)
    assert (checked.cache.stats.query_tokens, checked.cache.stats.hit_tokens) == (20, 0)
    assert checked.cache.stats.inserted_tokens == 20
    assert checked.serve(range(20)) == 19
    assert (checked.cache.stats.query_tokens, checked.cache.stats.hit_tokens) == (40, 19)


def test_8_recompute_after_a_preemption_is_counted_apart() -> None:
    cache = KVCacheManager(8, 4)
    cache.record_admission(10, 4, recompute=False)
    cache.record_admission(14, 8, recompute=True, host_tokens=4)
    stats = cache.stats
    assert (stats.query_tokens, stats.hit_tokens) == (10, 4)
    assert (stats.recompute_query_tokens, stats.recompute_hit_tokens, stats.recompute_host_tokens) == (14, 8, 4)


def test_9_a_split_removes_nothing() -> None:
    checked = checked_cache()
    checked.serve(range(30))
    before = checked.cache.account()
    for length in (29, 3, 17, 8, 1):
        assert checked.cache.match(NS, range(length + 1), 5.0).length == length
        checked.check()
    assert checked.cache.account() == before and checked.cache.stats.evicted_pages == 0
    assert checked.cache.peek(NS, range(31)) == 30


def test_9_two_misses_share_nothing_that_can_be_changed() -> None:
    checked = checked_cache()
    a, b = (checked.cache.lock(checked.cache.match(NS, range(5), 0.0)) for _ in range(2))
    checked.cache.extend(a, 5)
    assert b.pages == [] and b.num_shared == 0
    checked.cache.finish(a, [], 0.0)
    checked.cache.finish(b, [], 0.0)
    assert checked.cache.lock(checked.cache.match(NS, range(5), 0.0)).pages == []


def test_10_nothing_stays_pinned_after_the_last_lease() -> None:
    """There is no pin with a lifetime of its own: a lease is the only thing that holds pages."""
    checked = checked_cache()
    clients = [checked.start([*range(6), *range(start, start + 9)]) for start in (20, 40, 60)]
    for client in clients:
        checked.insert(client, 11)
    for client in clients:
        checked.end(client)
    account = checked.cache.account()
    assert account.locked == account.private == 0 and checked.cache.available == 64


def test_11_a_page_shared_by_many_is_counted_once() -> None:
    checked = checked_cache()
    checked.serve(range(12))
    leases = [checked.cache.lock(checked.cache.match(NS, range(13), 5.0)) for _ in range(5)]
    assert checked.cache.account() == (61, 0, 3, 0, 0)
    for lease in leases[:-1]:
        checked.cache.finish(lease, [], 5.0)
        assert checked.cache.account() == (61, 0, 3, 0, 0)
    checked.cache.finish(leases[-1], [], 5.0)
    assert checked.cache.account() == (61, 3, 0, 0, 0)
