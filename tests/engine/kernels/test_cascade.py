"""Rows that begin with the same pages attend to these together, and get the same as each alone, bit for bit."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.attention.native import NativeStep
from engine.kernels import native
from tests.engine.support.paged_kv import Heads
from tests.engine.support.shared_pages import SharedPages, SharingRow

HEADS = Heads(2, 2, 32)


def groups_of(step: NativeStep) -> list[tuple[list[int], int]]:
    """Return the rows of each of a step's groups, and how many positions they attend to together."""
    batch = step.struct
    if not batch.num_groups:
        return []
    numbers = (ctypes.c_int32 * (3 * batch.num_groups)).from_address(batch.groups)
    members = (ctypes.c_int32 * batch.num_rows).from_address(batch.members)
    starts = range(0, len(numbers), 3)
    return [(list(members[numbers[i] : numbers[i] + numbers[i + 1]]), numbers[i + 2]) for i in starts]


def found(rows: list[SharingRow], page_size: int = 16, heads: Heads = HEADS) -> list[tuple[list[int], int]]:
    return groups_of(SharedPages(rows, heads, page_size).step(is_cascade=True))


def assert_same(case: SharedPages, isa: str | None = None) -> None:
    alone = case.attend(is_cascade=False, isa=isa)
    assert alone.isfinite().all()
    assert torch.equal(case.attend(is_cascade=True, isa=isa), alone)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.builds(
            lambda prefix, positions, before, new: (prefix, positions, before, new),
            st.integers(0, 1),
            st.sampled_from([0, 300, 512, 544, 600, 1030, 1100]),
            st.sampled_from([0, 1, 15, 40, 530]),
            st.sampled_from([1, 1, 1, 2, 5, 20]),
        ),
        min_size=2,
        max_size=7,
    ),
    heads=st.builds(Heads, st.integers(1, 5), st.integers(1, 3), st.sampled_from([32, 64, 96]))
    | st.builds(Heads, st.integers(1, 16), st.just(1), st.just(96), st.just(64)),
    page_size=st.sampled_from([1, 3, 16, 48, 256]),
    soft_cap=st.sampled_from([None, None, 0.5]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_rows_get_the_same_together_as_separately(
    kernels: native.Kernels,
    rows: list[tuple[int, int, int, int]],
    heads: Heads,
    page_size: int,
    soft_cap: float | None,
    has_sinks: bool,
    seed: int,
) -> None:
    sharing = [SharingRow(prefix, positions // page_size, *rest) for prefix, positions, *rest in rows]
    case = SharedPages(sharing, heads, page_size, kernels.dtype, None, soft_cap, has_sinks, seed)
    assert_same(case, kernels.isa)


def test_rows_get_the_same_in_a_full_group_with_drafts(kernels: native.Kernels) -> None:
    """Rows of several lengths and numbers of tokens, of which some end inside the prefix's last piece."""
    rows = [SharingRow(0, 75, 30 * index, 1 + index % 3) for index in range(20)]
    case = SharedPages(rows, Heads(3, 1, 64), 16, kernels.dtype)
    assert [positions for _, positions in groups_of(case.step(is_cascade=True))] == [1184, 1184]
    assert_same(case, kernels.isa)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same(SharedPages([SharingRow(0, 70, 20 * index) for index in range(9)], HEADS, 16))
    finally:
        torch.set_num_threads(before)


def test_layers_with_a_window_attend_row_by_row() -> None:
    rows = [SharingRow(0, 40, 3 * index) for index in range(4)]
    case = SharedPages(rows, HEADS, 16, window=700)
    assert groups_of(case.step(is_cascade=True)), "other layers of the model may have none"
    assert_same(case)


def test_rows_with_the_same_pages_are_a_group_whatever_lies_between_them() -> None:
    rows = [
        SharingRow(0, 40, 5),
        SharingRow(1, 40, 5),
        SharingRow(0, 40, 9),
        SharingRow(2, 40, 1),
        SharingRow(1, 40, 0),
    ]
    assert found(rows) == [([0, 2], 640), ([1, 4], 640)]


def test_only_whole_pages_that_all_of_a_rows_queries_see_are_shared() -> None:
    rows = [SharingRow(0, 3, 100), SharingRow(0, 3, 7, 3)]  # three pages of 200 positions
    assert found(rows, 200) == [([0, 1], 576)], "whole blocks of 32"


def test_the_prefix_is_shared_whose_sharing_saves_most() -> None:
    """Two rows have 1,600 positions in common, and with six others 800."""
    rows = [SharingRow(0, 100, 1), SharingRow(0, 100, 2), *(SharingRow(0, 50, n) for n in range(6))]
    assert found(rows) == [(list(range(8)), 800)]
    rows = [SharingRow(0, 100, 1), SharingRow(0, 100, 2), SharingRow(0, 32, 3)]
    assert found(rows) == [([0, 1], 1600)]


def test_short_prefixes_and_rows_with_many_tokens_are_not_grouped() -> None:
    assert found([SharingRow(0, 31, 40), SharingRow(0, 31, 50)]) == [], "496 positions"
    assert found([SharingRow(0, 32, 40), SharingRow(0, 32, 50)]) == [([0, 1], 512)]
    assert found([SharingRow(0, 40, 5), SharingRow(0, 40, 5, 9)]) == [], "18 queries a KV head"
    assert found([SharingRow(0, 40, 5)]) == []
    assert groups_of(SharedPages([SharingRow(0, 40, 5)] * 2, HEADS, 16).step(is_cascade=False)) == []


def test_a_prefix_of_very_many_rows_has_groups_of_about_the_same_size() -> None:
    groups = found([SharingRow(0, 32, 1)] * 100)
    assert [len(rows) for rows, _ in groups] == [25] * 4
    assert sorted(row for rows, _ in groups for row in rows) == list(range(100))
