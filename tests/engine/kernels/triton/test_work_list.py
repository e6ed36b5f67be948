"""The work list of a decode step holds each tile exactly once, in items as even as possible."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")
from engine.kernels.triton.work_list import WorkList
from tests.engine.support.devices import DEVICE


def items(work: WorkList, kv_lens: Sequence[int], window: int | None = None) -> list[tuple[int, range]]:
    """Return the row and tiles of each item."""
    work.build(torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE), window)
    number, chunk, *_ = work.sizes.tolist()
    assert number <= work.capacity
    bounds = work.row_parts[: len(kv_lens) + 1].tolist()
    assert (bounds[0], bounds[-1]) == (0, number)
    listed = []
    for index, (row, first) in enumerate(work.items[:number].tolist()):
        assert bounds[row] <= index < bounds[row + 1]
        listed.append((row, range(first, min(first + chunk, -(-kv_lens[row] // 64)))))
    return listed


@pytest.mark.parametrize("num_programs", [1, 7, 64])
@pytest.mark.parametrize("window", [None, 1, 64, 1000])
@pytest.mark.parametrize("kv_lens", [[1], [64], [65, 0, 3], [5000, 1, 129, 64, 700], [300] * 40])
def test_each_visible_tile_is_in_one_item(kv_lens: list[int], window: int | None, num_programs: int) -> None:
    """Some rows are empty, some lists have more rows than are examined at once; lists are rebuilt in place."""
    work = WorkList(48, 2, num_programs, DEVICE)
    items(work, [7] * 48)
    visible = [
        (row, tile)
        for row, length in enumerate(kv_lens)
        for tile in range(max(0, length - (window or length)) // 64, -(-length // 64))
    ]
    assert sorted((row, tile) for row, tiles in items(work, kv_lens, window) for tile in tiles) == visible


def test_a_long_row_is_for_all_programs() -> None:
    assert [len(tiles) for _, tiles in items(WorkList(1, 2, 16, DEVICE), [64 * 32])] == [4] * 8


def test_many_rows_are_not_split() -> None:
    assert len(items(WorkList(32, 2, 16, DEVICE), [600] * 32)) == 32


def test_rows_that_would_leave_half_a_turn_empty_are_split() -> None:
    """With nine rows of 16 tiles for 16 programs, whole rows would take two turns, the second nearly empty."""
    listed = items(WorkList(9, 1, 16, DEVICE), [16 * 64] * 9)
    turns, longest = -(-len(listed) // 16), max(len(tiles) for _, tiles in listed)
    assert turns * longest < 2 * 16
