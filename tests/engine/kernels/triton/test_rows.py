"""The kernels that enter and leave a decode step compute what torch's operations do, in a launch each."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from engine.graphs.device_rows import DeviceRows
from engine.graphs.row_assignment import IN_USE, NUM_PROMPT, POSITION, TABLE, TOKEN, RowLayout
from engine.kernels.triton import rows as kernels
from engine.sampling.graph_chooser import RowParams
from tests.engine.support.devices import DEVICE
from tests.engine.support.operations_seen import VIEWS, Operations
from tests.engine.support.row_words import write_words


def rows_of(num_rows: int, page_size: int, num_groups: int = 1) -> DeviceRows:
    """Rows of which some are in use, with random positions, tokens and pages."""
    layout = RowLayout(num_rows, 10, page_size, 5, 6, num_groups)
    made, generator = DeviceRows(layout, DEVICE), torch.Generator().manual_seed(num_rows)

    def random(below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=generator)

    used = random(2, num_rows)
    fields = {
        IN_USE: used,
        POSITION: random(9 * page_size, num_rows) * used,
        TOKEN: random(1000, num_rows) * used,
        NUM_PROMPT: random(4, num_rows) * used,
        TABLE: random(60, num_groups, num_rows, 10),
    }
    for field, words in fields.items():
        write_words(made, layout.field(field), words)
    return made


def entered(rows: DeviceRows, count: int) -> list[list[int]]:
    """Enter a step of the first rows, and return all its inputs, with the tokens of the last step."""
    rows.enter(count)
    batch, seen = rows.batch(count, 9), []

    def noting(logits: torch.Tensor, params: RowParams, positions: torch.Tensor, *, cuts: bool) -> torch.Tensor:
        seen.append(positions)
        return positions

    rows.choose(count, torch.empty(0), noting, cuts=False)
    more = [] if batch.more_slots is None else batch.more_slots.unbind()
    parts = batch.kv_lens, batch.slot_mapping, *more, batch.positions, rows.token_ids(count), *seen, rows.sampled
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize(("num_rows", "count", "page_size"), [(1, 1, 16), (7, 4, 1), (130, 130, 3), (256, 65, 64)])
def test_steps_by_kernels_are_steps_by_torch(num_rows: int, count: int, page_size: int, num_groups: int) -> None:
    ours, theirs = rows_of(num_rows, page_size, num_groups), rows_of(num_rows, page_size, num_groups)
    ours.kernels, theirs.kernels = kernels, None
    tokens = torch.arange(count, device=DEVICE) * 7 % 50 - 2  # Some rows have no valid token.
    assert entered(ours, count) == entered(theirs, count)
    for made in (ours, theirs):
        made.advance(count, tokens)
    assert entered(ours, num_rows) == entered(theirs, num_rows), "rows after the first are as they were"


def test_each_is_one_launch_and_no_other_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, *_, **__: launched.append(kernel.fn.__name__))

    rows, tokens = rows_of(8, 16), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    rows.kernels = kernels
    with Operations() as operations:
        rows.enter(4)
        rows.batch(4, 16)
        rows.token_ids(4)
        rows.advance(4, tokens)
    assert launched == ["_enter", "_leave"]
    assert operations.seen <= VIEWS
