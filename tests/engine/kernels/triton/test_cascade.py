"""Decodes that begin with the same pages attend to these together, and get what each gets alone but rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl

from engine.attention.triton import TritonAttention
from engine.attention.triton_step import TritonStep
from engine.kernels.triton import decode as decode_module
from engine.kernels.triton import shared_prefixes
from engine.kernels.triton.shared_prefixes import RowGroups
from engine.kernels.triton.work_list import WorkList
from tests.engine.support.devices import DEVICE
from tests.engine.support.paged_kv import Heads
from tests.engine.support.shared_pages import SharedPages, SharingRow

shared_pages = partial(SharedPages, device=DEVICE)
HEADS = Heads(2, 2, 32)
_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of outputs of at most about 0.3: sums in another order, and results rounded to the type."""


def found(rows: list[SharingRow], page_size: int = 16, most_members: int = 32) -> dict[int, tuple[list[int], int]]:
    """Return, by the row that leads it, the rows of each part of a group and how many positions they share."""
    batch = shared_pages(rows, Heads(1, 1, 16), page_size).batch
    groups = RowGroups(len(rows), page_size, most_members, DEVICE)
    groups.members.fill_(77)
    groups.find(batch.block_table, batch.kv_lens)
    parts = {}
    for row, (leader, tiles) in enumerate(zip(groups.leaders.tolist(), groups.tiles.tolist(), strict=True)):
        assert (leader < 0) == (tiles == 0)
        if leader == row:
            members = [member for member in groups.members[row].tolist() if member >= 0]
            assert members == [at for at, its in enumerate(groups.leaders.tolist()) if its == row]
            parts[row] = members, 64 * tiles
    return parts


def steps(case: SharedPages) -> tuple[TritonStep, TritonStep]:
    """Prepare a step whose rows attend together, and one whose rows attend alone."""
    together, alone = (
        TritonAttention(replace(case.shape, is_cascade=is_cascade)).prepare(case.batch, case.pages.null_page)
        for is_cascade in (True, False)
    )
    return together, alone


def assert_same(case: SharedPages) -> None:
    together, alone = (case.attend_by(step) for step in steps(case))
    assert alone.isfinite().all() and together.isfinite().all()
    assert (together.float() - alone.float()).abs().max() < _TOLERANCE[case.query.dtype]


@pytest.mark.parametrize(
    ("soft_cap", "has_sinks", "dtype"),
    [
        (None, False, torch.float32),
        (0.5, False, torch.float32),
        (None, True, torch.float32),
        (0.5, True, torch.bfloat16),
        (None, False, torch.float16),
    ],
)
def test_rows_get_the_same_together_as_separately(
    soft_cap: float | None, has_sinks: bool, dtype: torch.dtype
) -> None:
    """Two groups of several lengths, one with a row that has no tile of its own but one, and rows in none."""
    rows = [
        SharingRow(0, 38, 5),
        SharingRow(1, 33, 70),
        SharingRow(2, 3, 9),
        SharingRow(0, 38, 0),
        SharingRow(1, 33, 1),
        SharingRow(0, 38, 100),
    ]
    case = shared_pages(rows, Heads(2, 1, 32), 16, dtype, soft_cap=soft_cap, has_sinks=has_sinks)
    assert_same(case)


@pytest.mark.parametrize(
    "heads",
    [Heads(1, 1, 64), Heads(3, 2, 32), Heads(8, 1, 80), Heads(32, 1, 16)],
    ids=lambda heads: str(heads.group),
)
def test_heads_that_fill_a_program_or_not(heads: Heads) -> None:
    """Of groups of 32 heads a program takes two rows, so that one of three rows has two parts."""
    assert_same(shared_pages([SharingRow(0, 9, 3), SharingRow(0, 9, 64), SharingRow(0, 9, 20)], heads, 64))


@pytest.mark.parametrize("page_size", [1, 3, 48, 256])
def test_page_sizes(page_size: int) -> None:
    """What is shared ends at whole tiles, wherever pages end."""
    rows = [SharingRow(0, -(-600 // page_size), before) for before in (0, 50)]
    assert_same(shared_pages(rows, Heads(2, 1, 16), page_size))


def test_layers_with_a_window_attend_row_by_row() -> None:
    case = shared_pages([SharingRow(0, 40, 3), SharingRow(0, 40, 9)], HEADS, 16, window=100)
    case.shape = replace(case.shape, windows=frozenset({100, None}))
    together, alone = steps(case)
    assert torch.equal(case.attend_by(together), case.attend_by(alone))
    case.window = None
    assert_same(case)


def test_groups_of_too_many_heads_attend_row_by_row() -> None:
    case = shared_pages([SharingRow(0, 40, 3), SharingRow(0, 40, 9)], Heads(33, 1, 16), 16)
    together, alone = steps(case)
    assert torch.equal(case.attend_by(together), case.attend_by(alone))


@contextmanager
def only_tiles_of_their_own(case: SharedPages) -> Iterator[None]:
    """Show `decode` no page that rows share, while the pass before it sees all."""
    decode = decode_module.decode
    shared = [
        page for page, count in zip(*case.batch.block_table.unique(return_counts=True), strict=True) if count > 1
    ]
    own = case.pages.layer(0).clone()
    own[:, [int(page) for page in shared if page != case.pages.null_page]] = torch.nan

    def decode_own(query: torch.Tensor, pages: torch.Tensor, *args: object, **options: object) -> None:
        decode(query, own, *args, **options)  # type: ignore[arg-type]

    with patch("engine.attention.triton_step.decode", decode_own):
        yield


def test_a_rows_own_pass_does_not_read_its_shared_prefix() -> None:
    case = shared_pages([SharingRow(0, 36, 3), SharingRow(0, 36, 40), SharingRow(0, 36, 90)], HEADS, 16)
    together, alone = steps(case)
    expected = case.attend_by(alone)
    with only_tiles_of_their_own(case):
        assert (case.attend_by(together) - expected).abs().max() < 2e-6
        assert case.attend_by(alone).isnan().all()


def test_a_step_can_be_repeated_after_its_rows_have_changed() -> None:
    """As a graph repeats it: the same tensors, lists and buffers, other lengths and pages."""
    first = shared_pages([SharingRow(0, 36, 3), SharingRow(0, 36, 90), SharingRow(1, 2, 5)], HEADS, 16, seed=1)
    then = shared_pages([SharingRow(0, 5, 0), SharingRow(1, 40, 30), SharingRow(1, 40, 7)], HEADS, 16, seed=2)
    width = max(case.batch.block_table.shape[1] for case in (first, then))
    table, kv_lens = (
        torch.zeros(3, width, dtype=torch.int32, device=DEVICE),
        torch.zeros(3, dtype=torch.int32, device=DEVICE),
    )
    groups = RowGroups(3, 16, 32, DEVICE)
    work = WorkList(3, 2, 5, DEVICE, groups, 5)
    for case, shared in ((first, [9, 9, 0]), (then, [0, 10, 10]), (first, [9, 9, 0])):
        table.zero_()[:, : case.batch.block_table.shape[1]] = case.batch.block_table
        kv_lens.copy_(case.batch.kv_lens)
        groups.find(table, kv_lens)
        work.build(kv_lens, None)
        assert groups.tiles.tolist() == shared
        assert not work.arrived.any()


@pytest.mark.parametrize("num_programs", [1, 5, 64])
def test_each_tile_is_in_one_item_and_each_piece_has_a_partial_result(num_programs: int) -> None:
    rows = [SharingRow(0, 64, 5), SharingRow(1, 2, 9), SharingRow(0, 64, 100), SharingRow(0, 64, 300)]
    batch = shared_pages(rows, Heads(1, 1, 16), 16).batch
    groups = RowGroups(4, 16, 2, DEVICE)
    groups.find(batch.block_table, batch.kv_lens)
    work = WorkList(4, 2, num_programs, DEVICE, groups, num_programs)
    work.build(batch.kv_lens, None)
    number, chunk, num_shared, shared_chunk = work.sizes.tolist()
    tiles = [-(-length // 64) for length in batch.kv_lens_host]
    seen: dict[int, list[int]] = {row: [] for row in range(4)}
    pieces = dict.fromkeys(range(4), 0)
    for row, first in work.items[:number].tolist():
        seen[row] += range(first, min(first + chunk, tiles[row]))
        pieces[row] += 1
    for leader, first in work.shared_items[:num_shared].tolist():
        for row in groups.members[leader].tolist():
            if row >= 0:
                seen[row] += range(first, min(first + shared_chunk, int(groups.tiles[leader])))
                pieces[row] += 1
    assert {row: sorted(its) for row, its in seen.items()} == {row: list(range(n)) for row, n in enumerate(tiles)}
    assert work.row_parts.diff().tolist() == list(pieces.values())
    assert work.row_parts[-1] <= work.capacity


def test_rows_with_the_same_pages_are_a_group_whatever_lies_between_them() -> None:
    rows = [*(SharingRow(prefix, 40, 5) for prefix in (0, 1, 0, 2, 1)), SharingRow(3, 0, 1)]
    assert found(rows) == {0: ([0, 2], 640), 1: ([1, 4], 640)}


def test_rows_prefer_the_prefix_whose_sharing_saves_most() -> None:
    """Two rows have 1,600 positions in common, and with six others 800."""
    rows = [SharingRow(0, 100, 1), SharingRow(0, 100, 2), *(SharingRow(0, 50, n) for n in range(6))]
    assert found(rows) == {0: (list(range(8)), 768)}, "whole tiles of 64"
    rows = [SharingRow(0, 100, 1), SharingRow(0, 100, 2), SharingRow(0, 32, 3)]
    assert found(rows) == {0: ([0, 1], 1600)}


def test_rows_left_by_those_that_share_more_are_a_group_too() -> None:
    """All six have 512 positions in common, and the first three of them 1,600."""
    rows = [*(SharingRow(0, 100, n) for n in range(3)), *(SharingRow(0, 32, n) for n in range(3))]
    assert found(rows) == {0: ([0, 1, 2], 1600), 3: ([3, 4, 5], 512)}


def test_short_prefixes_are_not_grouped() -> None:
    assert found([SharingRow(0, 31, 40), SharingRow(0, 31, 50)]) == {}, "496 positions"
    assert found([SharingRow(0, 32, 0), SharingRow(0, 32, 0)]) == {0: ([0, 1], 512)}
    assert found([SharingRow(0, 40, 5)]) == {}


def test_a_prefix_of_many_rows_has_parts_of_about_the_same_size() -> None:
    parts = found([SharingRow(0, 32, 1)] * 20, most_members=8)
    assert [len(rows) for rows, _ in parts.values()] == [7, 7, 6]
    assert sorted(row for rows, _ in parts.values() for row in rows) == list(range(20))


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels do not take another constant")
def test_rows_after_those_that_are_examined_attend_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "_ROWS", tl.constexpr(4))
    rows = [SharingRow(1, 0, 1), SharingRow(0, 32, 1), SharingRow(1, 0, 1), SharingRow(0, 32, 1)]
    assert found([*rows, SharingRow(0, 32, 1), SharingRow(0, 32, 1)]) == {1: ([1, 3], 512)}


def test_rows_on_one_page_keep_their_last_position_to_themselves() -> None:
    """As steps do that warm an engine up: their pages are all the same."""
    groups = RowGroups(2, 64, 8, DEVICE)
    kv_lens = torch.tensor([1024, 1024], dtype=torch.int32, device=DEVICE)
    groups.find(torch.zeros(2, 16, dtype=torch.int32, device=DEVICE), kv_lens)
    assert groups.tiles.tolist() == [15, 15]
