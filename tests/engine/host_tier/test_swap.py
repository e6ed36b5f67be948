"""Host pages: what is copied out and in, when it pays, and that none is lost or read after it was handed out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.host_tier.host_pool import HostAccount, HostMemory, HostPool
from engine.host_tier.swap import SwapSpace
from engine.values.plan import PagePair
from tests.support.examples import examples


def space(num_pages: int = 8, mode: str = "swap") -> SwapSpace:
    return SwapSpace(HostPool(HostMemory(num_pages)), 4, mode)


def swap_out(
    swap: SwapSpace, name: str, table: Sequence[int], start: int, end: int, rate: float = 0.0
) -> list[PagePair]:
    return swap.swap_out(name, table, start, end, rate)


def test_pages_that_only_it_held_go_out_and_those_that_the_tree_lost_come_in() -> None:
    """Tokens 0 to 6 are others' too: page 1, in which that ends, goes along. Of 18 tokens the tree still has 9."""
    swap = space()
    assert swap_out(swap, "a", [30, 31, 32, 33, 34, 35], 6, 18) == [(31, 0), (32, 1), (33, 2), (34, 3)]
    assert swap.account() == HostAccount(4, 4)
    assert swap.reach("a", 9) == 18
    assert swap.swap_in("a", [30, 31, 50, 51, 52], 8) == [(50, 1), (51, 2), (52, 3)]
    assert swap.account() == HostAccount(4, 4), "the step that reads them has not run"
    swap.pool.begin_step()
    assert swap.account() == HostAccount(8, 0)


def test_pages_that_the_tree_kept_need_no_copy() -> None:
    swap = space()
    swap_out(swap, "a", [1, 2, 3], 0, 10)
    assert swap.reach("a", 10) == 10
    assert swap.swap_in("a", [1, 2, 3], 10) == []
    swap.pool.begin_step()
    assert swap.account().held == 0


def test_a_hole_before_the_hosts_pages_is_computed() -> None:
    swap = space()
    swap_out(swap, "a", [1, 2, 3, 4], 8, 16)
    assert swap.reach("a", 7) == 7
    assert swap.reach("a", 8) == 16
    assert swap.swap_in("a", [5, 6, 7, 8], 4) == []


def test_a_full_pool_leaves_the_request_to_be_computed_again() -> None:
    swap = space(num_pages=2)
    assert len(swap_out(swap, "a", [1, 2], 0, 8)) == 2
    assert swap_out(swap, "b", [3], 0, 4) == []
    assert swap.reach("b", 0) == 0
    assert swap.swap_in("b", [9], 0) == []
    swap.forget("a")
    swap.forget("a")
    assert len(swap_out(swap, "c", [3], 0, 4)) == 1


def test_a_request_preempted_before_it_read_its_pages_still_has_them() -> None:
    swap = space()
    swap_out(swap, "a", [1, 2], 0, 8)
    assert swap_out(swap, "a", [], 0, 0) == []
    assert swap.reach("a", 0) == 8
    assert swap.swap_in("a", [4, 5], 0) == [(4, 0), (5, 1)]


def test_recompute_copies_nothing_and_an_unknown_mode_is_refused() -> None:
    assert swap_out(space(mode="recompute"), "a", [1, 2], 0, 8) == []
    with pytest.raises(ValueError, match=r"'swop'.*auto, recompute, swap"):
        space(mode="swop")


@pytest.mark.parametrize(("rate", "swaps"), [(0.0, True), (3.0, True), (5.0, False)])
def test_auto_chooses_the_cheaper_way(rate: float, swaps: bool) -> None:
    """Two pages of a second each way are 4 s; 16 tokens at `rate` a second are 5.3 s or 3.2 s."""
    swap = SwapSpace(HostPool(HostMemory(8, 1.0)), 8)
    assert bool(swap_out(swap, "a", [1, 2], 0, 16, rate)) == swaps


def test_auto_learns_that_the_tree_keeps_preempted_pages() -> None:
    swap = SwapSpace(HostPool(HostMemory(8, 1.0)), 8)
    for _ in range(20):
        swap_out(swap, "a", [1, 2], 0, 16, 1.0)
        swap.swap_in("a", [1, 2], 16)
        swap.pool.begin_step()
    assert swap_out(swap, "a", [1, 2], 0, 16, 1.0) == [], "nothing is lost: nothing would be computed again"
    for _ in range(20):
        swap.swap_in("a", [1, 2], 0)
        swap.pool.begin_step()
        swap_out(swap, "a", [1, 2], 0, 16, 1.0)
    assert swap.swap_in("a", [1, 2], 0) == [(1, 0), (2, 1)]


moves = st.lists(
    st.tuples(
        st.sampled_from(["swap_out", "swap_in", "forget", "step"]),
        st.integers(0, 5),
        st.integers(0, 40),
        st.integers(0, 40),
    ),
    max_size=60,
)


@settings(max_examples=examples(100), deadline=None)
@given(moves, st.integers(0, 12), st.sampled_from([1, 3, 4]))
def test_no_page_is_lost_shared_or_written_before_it_was_read(
    script: list[tuple[str, int, int, int]], num_pages: int, page_size: int
) -> None:
    """In a model of memory, page i of request r holds (r, i); a step's copies out go before those in."""
    swap, away, host = (
        SwapSpace(HostPool(HostMemory(num_pages)), page_size, "swap"),
        dict[str, int](),
        dict[int, tuple[str, int]](),
    )
    ins: list[tuple[str, PagePair]] = []
    for action, number, low, high in [*script, ("step", 0, 0, 0)]:
        name, table = str(number), [100 * number + i for i in range(41)]
        if action == "swap_out" and name not in away:
            for device, page in swap.swap_out(name, table, min(low, high), max(low, high), 0.0):
                host[page] = (name, device % 100)
            away[name] = max(low, high)
        elif action == "swap_in" and name in away:
            found = min(low, away.pop(name))
            reached = swap.reach(name, found)
            found -= found % page_size if reached > found else 0
            copies = swap.swap_in(name, table, found)
            assert len(copies) == (-(-reached // page_size) - found // page_size if reached > found else 0)
            ins += [(name, pair) for pair in copies]
        elif action == "forget":
            swap.forget(name)
            away.pop(name, None)
        elif action == "step":
            assert all(host[page] == (name, device % 100) for name, (device, page) in ins)
            ins.clear()
            swap.pool.begin_step()
        assert swap.account().total == num_pages
