"""Token-exact reuse: what is found, what is shared, what is copied, what stays private."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import KVCacheManager, Namespace, OutOfPages
from cache.radix_tree import common_prefix
from tests.cache.support.checked_cache import NAMESPACES, checked_cache


@pytest.mark.parametrize("page_size", range(1, 257))
def test_reuse_is_exact_to_the_token_at_any_page_size(page_size: int) -> None:
    """A second prompt shares all but its last tokens, wherever they diverge from the first."""
    checked = checked_cache(20, page_size)
    first = list(range(2 * page_size + page_size // 2 + 3))
    assert checked.serve(first) == 0
    for diverges in sorted({1, page_size - 1, page_size, page_size + 1, len(first) - 1} - {0}):
        assert checked.serve([*first[:diverges], 1000 + diverges, 7]) == diverges
    assert checked.serve(first) == len(first) - 1  # one token is left to compute
    assert checked.serve([*first, 5]) == len(first)


@given(st.integers(0, 200), st.integers(0, 200), st.booleans(), st.data())
def test_the_common_prefix_ends_at_the_first_difference(
    length: int, start: int, is_different: bool, data: st.DataObject
) -> None:
    """Whether tokens are in a list, a tuple or an array, as the wire brings them."""
    run = array("i", data.draw(st.lists(st.integers(0, 3), min_size=length, max_size=length)))
    following = run[:]
    expected = length
    if is_different and length:
        expected = data.draw(st.integers(0, length - 1))
        following[expected] += 1
    tokens = [9] * start + following.tolist() + [9]
    stop = data.draw(st.integers(start, len(tokens)))
    kinds: list[Callable[[Sequence[int]], Sequence[int]]] = [list, tuple, lambda ids: array("i", ids)]
    for kind in kinds:
        assert common_prefix(run, kind(tokens), start, stop) == min(expected, stop - start)


def test_whole_pages_are_shared_and_the_page_of_the_match_s_end_is_copied_once() -> None:
    checked = checked_cache()
    a = checked.start(range(10))
    checked.insert(a, 10)
    b = checked.admit(NAMESPACES[0], [*range(7), 99, 98])
    assert b is not None and b.copy is not None
    assert b.lease.pages[0] == a.lease.pages[0] and b.lease.num_shared == 1
    assert b.copy == (a.lease.pages[1], b.lease.pages[1], 3)
    assert checked.cache.extend(b.lease, 12) == []
    assert checked.cache.stats.copied_pages == 1


def test_a_request_without_room_for_the_copy_can_do_without() -> None:
    """Two pages, both held: locking the copy's source takes the page that the copy would need."""
    checked = checked_cache(num_pages=2)
    checked.serve(range(8))
    prompt = [*range(7), 99]
    lease = checked.cache.lock(checked.cache.match(NAMESPACES[0], prompt, 9.0))
    assert checked.cache.pages_needed(lease, 8) == 1 and checked.cache.available == 0
    with pytest.raises(OutOfPages, match="1 pages wanted for 8 tokens, 0 of 2 available"):
        checked.cache.extend(lease, 8)
    checked.cache.drop_partial(lease)
    assert lease.num_cached == 4 and checked.cache.available == 1
    assert checked.cache.extend(lease, 8) == []
    checked.cache.finish(lease, [], 9.0)
    assert checked.cache.account() == (1, 1, 0, 0, 0)


def test_the_source_of_a_copy_is_not_evicted_before_it_is_released() -> None:
    checked = checked_cache(num_pages=3)
    checked.serve(range(8))
    b = checked.admit(NAMESPACES[0], [*range(7), 99])
    assert b is not None and b.copy is not None
    assert checked.cache.evict(3) == 0 and checked.cache.account() == (0, 0, 2, 1, 0)
    checked.finish_copy(b)
    assert checked.cache.account() == (0, 1, 1, 1, 0)


def test_only_the_page_to_copy_is_locked_and_not_the_run_it_lies_in() -> None:
    checked = checked_cache(num_pages=100)
    checked.serve(range(320))
    b = checked.admit(NAMESPACES[0], [0, 1, 99])
    assert b is not None and checked.cache.account() == (19, 79, 1, 1, 0)


def test_concurrent_requests_with_one_prompt_end_up_on_one_set_of_pages() -> None:
    checked = checked_cache()
    a, b = checked.start(range(10)), checked.start(range(10))
    checked.insert(a, 10)
    assert checked.cache.account().private == 3
    checked.insert(b, 10)
    assert b.lease.pages[:2] == a.lease.pages[:2] and b.lease.pages[2] != a.lease.pages[2]
    assert checked.cache.account() == (60, 0, 3, 1, 0)
    checked.check()


def test_a_page_may_be_inserted_half_filled_and_written_on() -> None:
    """Others copy what was inserted of it; the tree keeps one page for all its tokens in the end."""
    checked = checked_cache()
    a = checked.start(range(6))
    checked.insert(a, 6)
    b = checked.start([*range(6), 50, 51])
    assert b.lease.num_cached == 6
    checked.continue_with(a, [60, 61, 62])
    checked.end(a)
    checked.end(b)
    assert checked.cache.peek(NAMESPACES[0], [*range(6), 60, 61, 62, 0]) == 9
    assert checked.cache.peek(NAMESPACES[0], [*range(6), 50, 51, 0]) == 8
    assert checked.cache.account().evictable == 4  # [0..3] [4 5 60 61] [62] and [4 5 50 51]


@pytest.mark.parametrize("shared", range(5))
def test_samples_of_one_prompt_that_agree_for_a_while_lose_nothing(shared: int) -> None:
    """Both wrote the page in which the prompt ends; the one whose page the tree has must get it back to go on."""
    checked = checked_cache(page_size=8)
    a = checked.start(range(10))
    checked.insert(a, 10)
    b = checked.start([*range(10), 20, 21, 22, 23, 24])
    checked.end(b)
    checked.continue_with(a, [*range(20, 20 + shared), *range(30, 45)])
    checked.insert(a, a.computed)
    checked.check()
    checked.continue_with(a, [77])
    checked.end(a)
    assert checked.cache.peek(NAMESPACES[0], [*a.tokens, 0]) == len(a.tokens)
    assert checked.cache.peek(NAMESPACES[0], [*b.tokens, 0]) == len(b.tokens)


def test_a_page_that_the_tree_holds_in_full_elsewhere_is_given_up() -> None:
    """Both samples agree to the end of the page and beyond: one of the two pages is freed."""
    checked = checked_cache()
    a = checked.start(range(6))
    checked.insert(a, 6)
    b = checked.start([*range(6), 20, 21, 22])
    checked.insert(b, 9)
    checked.continue_with(a, [20, 21, 22, 33])
    checked.insert(a, 10)
    checked.check()
    assert a.lease.pages[:2] == b.lease.pages[:2]
    checked.end(a)
    checked.end(b)
    assert checked.cache.account().evictable == 3, "one of the two last pages is enough, as well"


def test_a_page_that_is_being_copied_is_not_taken_from_under_the_copy() -> None:
    """The insert that would need it is put off, and done the next time."""
    checked = checked_cache(page_size=8)
    a = checked.start(range(10))
    checked.insert(a, 10)
    b = checked.start([*range(10), 20, 21])
    checked.insert(b, 12)
    c = checked.admit(NAMESPACES[0], [*range(10), 99])
    assert c is not None and c.copy is not None
    checked.continue_with(a, [20, 33])
    checked.insert(a, 12)
    checked.check()
    assert checked.cache.peek(NAMESPACES[0], [*a.tokens, 0]) == 11
    checked.finish_copy(c)
    checked.insert(a, 12)
    checked.check()
    assert checked.cache.peek(NAMESPACES[0], [*a.tokens, 0]) == 12


def test_a_conversation_does_not_leave_a_copied_page_behind_each_turn() -> None:
    checked = checked_cache(page_size=8)
    history: list[int] = []
    for turn in range(6):
        history += [100 + turn] * 5
        assert checked.serve(history) == len(history) - 5
    assert checked.cache.account().evictable == 4  # 30 tokens in pages of 8


def test_the_chunks_of_one_prompt_are_one_node() -> None:
    checked = checked_cache()
    a = checked.admit(NAMESPACES[0], list(range(50)))
    assert a is not None
    for _ in range(10):
        checked.compute(a, 5)
        checked.insert(a, a.computed)
        checked.check()
    assert len(list(checked.paths())) == 2  # the root and it


def test_namespaces_share_nothing_and_leave_nothing() -> None:
    checked = checked_cache()
    a, b = Namespace("m", "", "tenant a"), Namespace("m", "", "tenant b")
    checked.serve(range(10), a)
    assert checked.cache.peek(b, list(range(10))) == 0 and checked.serve(range(10), b) == 0
    assert checked.serve(range(10), a) == 9
    checked.cache.reset()
    for salt in range(100):
        assert checked.cache.match(Namespace("m", "", str(salt)), [1, 2, 3], 1.0).length == 0
        checked.cache.finish(
            checked.cache.lock(checked.cache.match(Namespace("m", "", str(salt)), [1, 2], 1.0)), [], 1.0
        )
    assert not checked.cache.tree.roots


def test_without_a_prefix_cache_nothing_is_found_and_everything_is_private() -> None:
    cache = KVCacheManager(8, 4, prefix_cache=False)
    tokens = list(range(10))
    lease = cache.lock(cache.match(NAMESPACES[0], tokens, 0.0))
    cache.extend(lease, 10)
    cache.insert(lease, tokens, 1.0)
    assert cache.account() == (5, 0, 0, 3, 0) and cache.peek(NAMESPACES[0], tokens) == 0
    cache.finish(lease, tokens, 2.0)
    assert cache.account() == (8, 0, 0, 0, 0) and cache.match(NAMESPACES[0], tokens, 3.0).length == 0


def test_peek_changes_nothing() -> None:
    checked = checked_cache(num_pages=2)
    checked.serve([1, 2, 3])
    checked.serve([7, 8, 9])
    for _ in range(9):
        assert checked.cache.peek(NAMESPACES[0], [1, 2, 3, 4]) == 3
    checked.cache.evict(1)
    assert checked.cache.peek(NAMESPACES[0], [1, 2, 3, 4]) == 0  # still the least recently used
    assert checked.cache.peek(NAMESPACES[0], []) == checked.cache.peek(NAMESPACES[0], [7]) == 0


def test_reset_drops_all_that_is_not_in_use() -> None:
    checked = checked_cache()
    checked.serve([5, 6, 7])
    a = checked.start(range(10))
    checked.insert(a, 10)
    assert checked.cache.reset() == 1
    checked.forget_evicted()
    checked.end(a)
    assert checked.cache.reset() == 3 and checked.cache.account() == (64, 0, 0, 0, 0)


def test_pages_that_a_path_holds_twice_can_be_had_back() -> None:
    """Two conversations go on inside one page, so each has its own: of one's path, the other's is given up."""
    checked = checked_cache(num_pages=5)
    for tokens in ([0] * 10, [0] * 10 + [1, 1], [0] * 10 + [2, 2]):
        checked.serve(tokens)
    client = checked.admit(NAMESPACES[0], [0] * 10 + [2, 2, 3, 3, 3])
    assert client is not None and client.lease.num_cached == 12
    checked.compute(client, 15)
    assert (len(client.lease.pages), checked.cache.account().locked) == (4, 4), (
        "three of its own, and the other's third"
    )
    assert not checked.extend(client, 17)
    checked.cache.reset()
    checked.forget_evicted()
    assert checked.extend(client, 17)
    checked.end(client)
    assert checked.serve([0] * 10 + [2, 2, 3, 3, 3]) == 14


def test_misuse_is_refused_with_a_reason() -> None:
    checked = checked_cache()
    with pytest.raises(ValueError, match="between 1 and 256"):
        KVCacheManager(8, 257)
    a = checked.start(range(10))
    with pytest.raises(ValueError, match="13 tokens cannot lie in 3 pages of 4"):
        checked.cache.insert(a.lease, list(range(13)), 1.0)
    checked.insert(a, 6)
    with pytest.raises(ValueError, match="differ from them at 5"):
        checked.cache.insert(a.lease, [9] * 10, 1.0)
    b = checked.admit(NAMESPACES[0], [0, 1, 2, 3, 4, 9])
    assert b is not None
    with pytest.raises(ValueError, match="returned the copy"):
        checked.cache.drop_partial(b.lease)
    with pytest.raises(ValueError, match="hit tokens of 4"):
        checked.cache.record_admission(4, 5, recompute=False)


@pytest.mark.parametrize("in_between", ["evicted", "trimmed", "regrown"])
def test_a_match_that_is_out_of_date_is_refused(in_between: str) -> None:
    checked = checked_cache()
    checked.serve(range(12))
    match = checked.cache.match(NAMESPACES[0], range(20), 5.0)
    checked.cache.evict({"evicted": 3, "trimmed": 1, "regrown": 1}[in_between])
    checked.forget_evicted()
    if in_between == "regrown":
        checked.serve([*range(8), 90, 91, 92, 93])
    with pytest.raises(ValueError, match="out of date"):
        checked.cache.lock(match)
