"""Computes all tokens' experts in three launches, whatever the load of each expert.

    tiles ─▶ _gate_up: SiLU(x @ gate) * (x @ up), rows sorted by expert ─▶ _down: @ down * share, back in the
    order of pairs (token, choice) ─▶ _combine: each token's pairs summed, in float32 and always in one order

A tile is a few rows of one expert (`expert_tiles`). There are no atomic additions, so results do not depend on the
order of programs; products are summed in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.triton.expert_tiles import expert_tiles
from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import shared_memory
from engine.kernels.triton.tile import is_interpreted


class _Shape(NamedTuple):
    """A tile's rows, outputs and inputs per step (in bytes), and a program's warps and stages."""

    rows: int
    outputs: int
    input_bytes: int
    num_warps: int
    num_stages: int

    def stages_in(self, shared_bytes: int) -> int:
        """Return how many steps, each of inputs and two weights, can be prefetched into a GPU's shared memory."""
        return max(1, min(self.num_stages, shared_bytes // ((self.rows + 2 * self.outputs) * self.input_bytes)))


_SHAPES: tuple[tuple[float, _Shape], ...] = (
    (16, _Shape(16, 64, 256, 4, 4)),
    (64, _Shape(32, 64, 256, 4, 4)),
    (float("inf"), _Shape(64, 128, 128, 8, 3)),
)
"""Tile shapes up to so many pairs per expert: decode is bound by reading weights, prefill by products."""
_BESIDE = 4096
"""Bytes of shared memory needed beside operands."""
_COLUMNS = 1024  # Columns of a token that one program sums.


def experts_mlp(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int,
) -> torch.Tensor:
    """Implement `engine.models.operations.ExpertsMLP` without waiting for the device."""
    (num_tokens, hidden), per_token = x.shape, chosen.shape[1]
    num_experts, _, inner = down.shape
    if not num_tokens:
        return torch.empty_like(x)
    num_pairs = num_tokens * per_token
    shape = next(shape for most, shape in _SHAPES if num_pairs <= most * num_experts)
    order, tiles = expert_tiles(chosen, num_experts, first_expert, shape.rows)
    weights = weights.contiguous()
    between, pairs = x.new_empty(num_pairs, inner), x.new_empty(num_pairs, hidden)
    blocks = {
        "ROWS": shape.rows,
        "OUTPUTS": shape.outputs,
        "INPUTS": shape.input_bytes // x.element_size(),
        "WIDEN": is_interpreted(_gate_up) and x.dtype == torch.bfloat16,
        "num_warps": shape.num_warps,
        "num_stages": shape.stages_in(shared_memory(x.device) - _BESIDE),
    }
    launch(
        _gate_up,
        (len(tiles), triton.cdiv(inner, shape.outputs)),
        x,
        gate_up,
        between,
        order,
        tiles,
        hidden,
        inner,
        *x.stride(),
        *gate_up.stride(),
        per_token,
        **blocks,
    )
    launch(
        _down,
        (len(tiles), triton.cdiv(hidden, shape.outputs)),
        between,
        down,
        weights,
        pairs,
        order,
        tiles,
        inner,
        hidden,
        *down.stride(),
        **blocks,
    )
    out = x.new_empty(num_tokens, hidden)
    columns = min(_COLUMNS, triton.next_power_of_2(hidden))
    launch(
        _combine,
        (num_tokens, triton.cdiv(hidden, columns)),
        pairs,
        chosen.contiguous(),
        out,
        hidden,
        first_expert,
        num_experts,
        per_token,
        columns,
    )
    return out


@triton.jit
def _gate_up(
    x,
    weight,
    out,
    order,
    tiles,
    hidden,
    inner,
    x_token,
    x_column,
    w_expert,
    w_output,
    w_input,
    PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute some gate outputs and the same up outputs of one tile's rows: [pairs, inner] sorted by expert."""
    tile = tiles + tl.program_id(0) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    is_row = row < tl.load(tile + 2)
    token = tl.load(order + row, is_row, 0).to(tl.int64) // PER_TOKEN
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_column = column < inner
    step = tl.arange(0, INPUTS)
    x_at = x + token[:, None] * x_token + step[None, :] * x_column
    gate_at = weight + expert * w_expert + column[None, :] * w_output + step[:, None] * w_input
    up_at = gate_at + inner * w_output
    gate = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, hidden, INPUTS):
        is_input = start + step < hidden
        inputs = tl.load(x_at, is_row[:, None] & is_input[None, :], 0.0)
        is_weight = is_input[:, None] & is_column[None, :]
        gate = _multiplied(inputs, tl.load(gate_at, is_weight, 0.0), gate, WIDEN)
        up = _multiplied(inputs, tl.load(up_at, is_weight, 0.0), up, WIDEN)
        x_at += INPUTS * x_column
        gate_at += INPUTS * w_input
        up_at += INPUTS * w_input
    result = gate / (1 + tl.exp(-gate)) * up
    out_at = out + row.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])


@triton.jit
def _down(
    between,
    weight,
    shares,
    out,
    order,
    tiles,
    inner,
    hidden,
    w_expert,
    w_output,
    w_input,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute some down outputs of one tile's rows of [pairs, inner], times their share, in the order of pairs."""
    tile = tiles + tl.program_id(0) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    is_row = row < tl.load(tile + 2)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_column = column < hidden
    step = tl.arange(0, INPUTS)
    row_at = between + row.to(tl.int64)[:, None] * inner + step[None, :]
    weight_at = weight + expert * w_expert + column[None, :] * w_output + step[:, None] * w_input
    result = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inner, INPUTS):
        is_input = start + step < inner
        inputs = tl.load(row_at, is_row[:, None] & is_input[None, :], 0.0)
        weights = tl.load(weight_at, is_input[:, None] & is_column[None, :], 0.0)
        result = _multiplied(inputs, weights, result, WIDEN)
        row_at += INPUTS
        weight_at += INPUTS * w_input
    pair = tl.load(order + row, is_row, 0).to(tl.int64)
    result *= tl.load(shares + pair, is_row, 0.0)[:, None]
    out_at = out + pair[:, None] * hidden + column[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])


@triton.jit
def _multiplied(a, b, total, WIDEN: tl.constexpr):
    """Return total + a @ b. The interpreter's bfloat16 product is wrong, so it computes in float32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit(do_not_specialize=["first_expert"])
def _combine(
    pairs,
    chosen,
    out,
    hidden,
    first_expert,
    num_experts,
    PER_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum a token's pairs whose experts are here; those of other experts were never written."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(PER_TOKEN):
        pair = token * PER_TOKEN + choice
        expert = tl.load(chosen + pair) - first_expert
        is_here = (expert >= 0) & (expert < num_experts)
        total += tl.load(pairs + pair * hidden + column, (column < hidden) & is_here, 0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), column < hidden)
