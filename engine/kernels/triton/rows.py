"""Enters and leaves a decode step: prepares its inputs from the device's rows, and updates the rows by its tokens.

    words of the rows:  token  position  in use  prompt  table        (`engine.graphs.row_assignment`)
    enter               ids, positions, lengths, slots, outputs       before the layers
    leave               token, position                               after sampling

Each is one launch instead of ten operations on a few numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch
from engine.kernels.triton.tile import start

_BLOCK = 64
"""Rows per program."""


class RowWords(NamedTuple):
    """The rows' words: int32 [R] each."""

    tokens: torch.Tensor
    positions: torch.Tensor
    in_use: torch.Tensor
    """0 or 1."""
    num_prompt: torch.Tensor
    tables: torch.Tensor
    """int32 [G, R, P], contiguous, for each group of layers."""


class RowInputs(NamedTuple):
    """The inputs of a step: [R] each, except the slots."""

    ids: torch.Tensor
    """int64."""
    positions: torch.Tensor
    """int64."""
    kv_lens: torch.Tensor
    """int32."""
    slots: torch.Tensor
    """int64 [G, R], contiguous."""
    num_output: torch.Tensor
    """int64: tokens generated before the one to choose."""


def enter(words: RowWords, inputs: RowInputs, count: int, page_size: int) -> None:
    """Write the inputs of the first `count` rows."""
    groups, rows, width = words.tables.shape
    launch(
        _enter,
        (-(-count // _BLOCK), groups),
        *words,
        *inputs,
        count,
        rows,
        PAGE_SIZE=page_size,
        MAX_PAGES=width,
        BLOCK=_BLOCK,
        num_warps=2,
    )


def leave(words: RowWords, chosen: torch.Tensor, sampled: torch.Tensor, count: int) -> None:
    """Advance the first `count` rows by their tokens, int64, and copy these to `sampled`. A negative one is 0."""
    launch(
        _leave,
        (-(-count // _BLOCK),),
        words.tokens,
        words.positions,
        words.in_use,
        chosen,
        sampled,
        count,
        BLOCK=_BLOCK,
        num_warps=2,
    )


@triton.jit(do_not_specialize=["count", "max_rows"])
def _enter(
    tokens,
    positions,
    in_use,
    num_prompt,
    tables,
    ids_out,
    positions_out,
    kv_lens_out,
    slots_out,
    num_output_out,
    count,
    max_rows,
    PAGE_SIZE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < count
    position = tl.load(positions + row, mask=is_row, other=0)
    place = tl.program_id(1).to(tl.int64) * max_rows + row  # the row's place among those of all groups of layers
    page = tl.load(tables + place * MAX_PAGES + position // PAGE_SIZE, mask=is_row, other=0)
    tl.store(slots_out + place, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE, mask=is_row)
    is_row = is_row & (tl.program_id(1) == 0)
    output = position + 1 - tl.load(num_prompt + row, mask=is_row, other=0)
    tl.store(ids_out + row, tl.load(tokens + row, mask=is_row, other=0).to(tl.int64), mask=is_row)
    tl.store(positions_out + row, position.to(tl.int64), mask=is_row)
    tl.store(kv_lens_out + row, position + 1, mask=is_row)
    tl.store(num_output_out + row, output.to(tl.int64), mask=is_row)


@triton.jit(do_not_specialize=["count"])
def _leave(tokens, positions, in_use, chosen, sampled, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < count
    token = tl.load(chosen + row, mask=is_row, other=0)
    used = tl.load(in_use + row, mask=is_row, other=0)
    position = tl.load(positions + row, mask=is_row, other=0)
    tl.store(sampled + row, token, mask=is_row)
    tl.store(tokens + row, tl.maximum(token, 0).to(tl.int32) * used, mask=is_row)
    tl.store(positions + row, (position + 1) * used, mask=is_row)
