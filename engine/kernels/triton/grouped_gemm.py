"""Computes all tokens' experts in a few launches, for any load of each expert.

    tiles ─▶ _gate_up: SiLU(x @ gate) * (x @ up), rows sorted by expert ─▶ _down: @ down * share, back in the
    order of pairs (token, choice) ─▶ _combine: each token's pairs summed, in float32 and always in one order

A tile is a few rows of one expert (`expert_tiles`); matrices are plain or quantized (`expert_products`). Inputs of
float8 matrices are rounded before, in a separate launch. There are no atomic additions, so results do not depend
on the order of programs. gpt-oss' experts have biases, and a clamped form of that activation; Gemma 4's have GELU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.triton.expert_products import ExpertMatrices, Stacked, multiplied
from engine.kernels.triton.expert_tiles import expert_tiles
from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import power_of_2, shared_memory
from engine.kernels.triton.silu import gelu
from engine.kernels.triton.tile import is_interpreted, start
from engine.model_parts.experts_config import Clamp


class _Shape(NamedTuple):
    """A tile's rows, a program's columns of the first matrix, twice those of the second, the inputs per step (in
    bytes), and the program's warps and stages.
    """

    rows: int
    columns: int
    input_bytes: int
    num_warps: int
    num_stages: int

    def options(self, x: torch.Tensor, matrices: ExpertMatrices, columns: int) -> dict[str, Any]:
        """Return how a program multiplies rows like `x` with so many columns. It prefetches as much as a GPU's
        shared memory holds.
        """
        step = matrices.step(self.input_bytes, x.element_size())
        bytes_each = matrices.step_bytes(self.rows, columns, step, x.element_size())
        held = (shared_memory(x.device) - _BESIDE) // bytes_each
        return {
            "KIND": matrices.kind,
            "GROUP": matrices.group,
            "ROWS": self.rows,
            "COLUMNS": columns,
            "STEP": step,
            "INTERPRETED": is_interpreted(_down),
            "num_warps": self.num_warps,
            "num_stages": max(1, min(self.num_stages, held)),
        }


_SHAPES: tuple[tuple[float, _Shape], ...] = (
    (16, _Shape(16, 128, 256, 4, 3)),
    (64, _Shape(32, 128, 256, 4, 3)),
    (float("inf"), _Shape(64, 256, 128, 8, 3)),
)
"""Tile shapes up to so many pairs per expert: decode is bound by reading weights, prefill by products."""
_BESIDE = 4096
"""Bytes of shared memory needed in addition to operands."""
_COLUMNS = 1024  # Columns of a token that one program sums.


def experts_mlp(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor | Stacked,
    down: torch.Tensor | Stacked,
    first_expert: int,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    clamp: Clamp | None = None,
    *,
    is_gelu: bool = False,
) -> torch.Tensor:
    """Implement `engine.layers.operations.ExpertsMLP` without waiting for the device."""
    (num_tokens, hidden), per_token = x.shape, chosen.shape[1]
    if not num_tokens:
        return torch.empty_like(x)
    num_pairs = num_tokens * per_token
    first, second = (ExpertMatrices.of(matrices, x.device) for matrices in (gate_up, down))
    num_experts, inner = len(second.weight), second.inputs
    bias, bias_down = (None, None) if biases is None else biases
    shape = next(shape for most, shape in _SHAPES if num_pairs <= most * num_experts)
    order, tiles = expert_tiles(chosen, num_experts, first_expert, shape.rows)
    weights = weights.contiguous()
    between, pairs = x.new_empty(num_pairs, inner), x.new_empty(num_pairs, hidden)
    columns = first.columns_each(shape.columns)
    read, read_scale = first.rounded(x if x.stride(1) == 1 else x.contiguous())
    launch(
        _gate_up,
        (len(tiles), -(-2 * inner // columns)),
        read,
        read_scale,
        first.weight,
        first.scale,
        first.zero,
        bias,
        between,
        order,
        tiles,
        hidden,
        inner,
        read.stride(0),
        PER_TOKEN=per_token,
        ALPHA=0.0 if clamp is None else clamp.alpha,
        LIMIT=0.0 if clamp is None else clamp.limit,
        IS_GELU=is_gelu,
        **shape.options(read, first, columns),
    )
    columns = second.columns_each(shape.columns // 2)
    read, read_scale = second.rounded(between)
    launch(
        _down,
        (len(tiles), -(-hidden // columns)),
        read,
        read_scale,
        second.weight,
        second.scale,
        second.zero,
        bias_down,
        weights,
        pairs,
        order,
        tiles,
        inner,
        hidden,
        **shape.options(read, second, columns),
    )
    out = x.new_empty(num_tokens, hidden)
    columns = min(_COLUMNS, power_of_2(hidden))
    launch(
        _combine,
        (num_tokens, -(-hidden // columns)),
        pairs,
        chosen.contiguous(),
        out,
        hidden,
        first_expert,
        num_experts,
        PER_TOKEN=per_token,
        COLUMNS=columns,
    )
    return out


@triton.jit
def _gate_up(
    x,
    x_scale,
    weight,
    scale,
    zero,
    bias,
    out,
    order,
    tiles,
    hidden,
    inner,
    x_stride,
    PER_TOKEN: tl.constexpr,
    ALPHA: tl.constexpr,  # 0: not clamped
    LIMIT: tl.constexpr,
    IS_GELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some gate outputs and the same up outputs of one tile's rows: [pairs, inner] sorted by expert.

    One product has both, each gate next to its up, so that a thread gets both results.
    """
    start(PDL)
    tile = tiles + tl.program_id(0) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    is_row = row < tl.load(tile + 2)
    token = tl.load(order + row, is_row, 0).to(tl.int64) // PER_TOKEN
    OUTPUTS: tl.constexpr = COLUMNS // 2
    first = tl.program_id(1) * OUTPUTS
    both = tl.arange(0, COLUMNS)
    output = first + both // 2
    is_output = output < inner
    own = output + both % 2 * inner
    product = multiplied(
        x,
        x_scale,
        token,
        is_row,
        x_stride,
        weight,
        scale,
        zero,
        expert,
        own,
        is_output,
        2 * inner,
        hidden,
        KIND,
        GROUP,
        STEP,
        INTERPRETED,
    )
    if bias is not None:
        product += tl.load(bias + expert * (2 * inner) + own, is_output, 0.0).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(product, (ROWS, OUTPUTS, 2)))
    if ALPHA > 0:  # by `where`, because a minimum with NaN would be a number
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        result = (up + 1) * gate / (1 + tl.exp(-gate * ALPHA))
    elif IS_GELU:
        result = gelu(gate) * up
    else:
        result = gate / (1 + tl.exp(-gate)) * up
    column = first + tl.arange(0, OUTPUTS)
    out_at = out + row.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), is_row[:, None] & (column < inner)[None, :])


@triton.jit
def _down(
    between,
    between_scale,
    weight,
    scale,
    zero,
    bias,
    shares,
    out,
    order,
    tiles,
    inner,
    hidden,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some down outputs of one tile's rows of [pairs, inner], times their share, in the order of pairs."""
    start(PDL)
    tile = tiles + tl.program_id(0) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    is_row = row < tl.load(tile + 2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < hidden
    result = multiplied(
        between,
        between_scale,
        row.to(tl.int64),
        is_row,
        inner,
        weight,
        scale,
        zero,
        expert,
        column,
        is_column,
        hidden,
        inner,
        KIND,
        GROUP,
        STEP,
        INTERPRETED,
    )
    if bias is not None:
        result += tl.load(bias + expert * hidden + column, is_column, 0.0).to(tl.float32)[None, :]
    pair = tl.load(order + row, is_row, 0).to(tl.int64)
    result *= tl.load(shares + pair, is_row, 0.0)[:, None]
    out_at = out + pair[:, None] * hidden + column[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])


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
    PDL: tl.constexpr,
):
    """Sum a token's pairs with experts on this rank; the others were never written."""
    start(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(PER_TOKEN):
        pair = token * PER_TOKEN + choice
        expert = tl.load(chosen + pair) - first_expert
        is_here = (expert >= 0) & (expert < num_experts)
        total += tl.load(pairs + pair * hidden + column, (column < hidden) & is_here, 0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), column < hidden)
