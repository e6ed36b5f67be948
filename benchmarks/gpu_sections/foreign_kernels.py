"""Kernels that the engine does not use, to compare its own with: FlashAttention-3, DeepGEMM and fla-core.

The first two are wheels for CUDA 13: `fa3-fwd` and `sgl-deep-gemm`. FlashAttention-3's reads no pages, so KV is
gathered first, and that counts. `fla-core` has kernels in Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu_sections.attention_cases import Case
from engine.model_parts.parts import DeltaNetConfig

_BLOCK = 128
_LARGEST = 448.0
"""The largest number of float8 e4m3."""


def flash_attention_3(case: Case) -> Callable[[], torch.Tensor]:
    """Return one layer's attention with KV gathered from the pages. Raises ImportError without the package."""
    attend = import_module("fa3_fwd_interface").flash_attn_varlen_func
    batch, size, device = case.batch, case.shape.page_size, case.query.device
    positions = [torch.arange(end, device=device) for end in batch.kv_lens_host]
    slots = torch.cat(
        [table[at // size] * size + at % size for table, at in zip(batch.block_table, positions, strict=True)]
    )
    ends = torch.tensor([0, *batch.kv_lens_host], device=device).cumsum(0).to(torch.int32)

    def call() -> torch.Tensor:
        keys, values = (part.flatten(0, 1).index_select(0, slots) for part in case.pages)
        lengths = batch.qo_indptr, ends, max(batch.query_lens), max(batch.kv_lens_host)
        found = attend(case.query, keys, values, *lengths, softmax_scale=case.shape.scale, causal=True)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.flatten(1)

    return call


def gated_delta_rule(
    convolved: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    shape: DeltaNetConfig,
    state: torch.Tensor,
) -> Callable[[], torch.Tensor]:
    """Return a function that computes the recurrence of a gated delta net for one prompt, whose queries, keys and
    values are `convolved`, [T, channels]. Its result is [T, num_value_heads, value_dim].

    decay, strength: float32 [T, num_value_heads]; state: the one before, float32 [num_value_heads, key_dim,
    value_dim]. Raises ImportError without the package.
    """
    compute = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    keys = shape.num_key_heads * shape.key_dim
    query, key, value = convolved[None].tensor_split((keys, 2 * keys), dim=2)
    query, key = (part.unflatten(2, (-1, shape.key_dim)).contiguous() for part in (query, key))
    value = value.unflatten(2, (-1, shape.value_dim)).contiguous()

    def call() -> torch.Tensor:
        found: torch.Tensor = compute(
            query,
            key,
            value,
            decay[None],
            strength[None],
            initial_state=state[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )[0]
        return found[0]

    return call


class Grouped(NamedTuple):
    """The products of a mixture's experts."""

    call: Callable[[], torch.Tensor]
    """Computes both products; returns the first [M, outputs]."""
    expected: torch.Tensor
    """The first by torch, for the rows that are no padding."""
    is_real: torch.Tensor
    """bool [M]"""


def deep_gemm(
    x: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *, is_fp8: bool
) -> Grouped:
    """Return both products of each token with its experts, without the activation between them.

    x: [N, hidden]; chosen: [N, per_token]; gate_up: [experts, 2 * inner, hidden]; down: [experts, hidden, inner].
    Rows are sorted by expert, and padded as DeepGEMM wants it. Raises ImportError without the package.
    """
    package = import_module("deep_gemm")
    align = int(package.get_mk_alignment_for_contiguous_layout())
    rows, layout = [], []
    for expert in range(len(gate_up)):
        own = (chosen == expert).any(1).nonzero()[:, 0].tolist()
        padding = -len(own) % align
        rows += own + [0] * padding
        layout += [expert] * len(own) + [-1] * padding
    pairs: list[tuple[Any, Any]]
    groups = torch.tensor(layout, dtype=torch.int32, device=x.device)
    first = x[torch.tensor(rows, device=x.device)]
    second = torch.randn(len(rows), down.shape[2], device=x.device).to(x.dtype)
    outs = [x.new_empty(len(rows), matrices.shape[1]) for matrices in (gate_up, down)]
    multiply, pairs = package.m_grouped_bf16_gemm_nt_contiguous, [(first, gate_up), (second, down)]
    if is_fp8:
        multiply = package.m_grouped_fp8_gemm_nt_contiguous
        pairs = [(_rows_in_fp8(left), _blocks_in_fp8(right)) for left, right in ((first, gate_up), (second, down))]

    def call() -> torch.Tensor:
        for (left, right), out in zip(pairs, outs, strict=True):
            multiply(left, right, out, groups)
        return outs[0]

    is_real = groups >= 0
    real = zip(first[is_real].split(1), groups[is_real].tolist(), strict=True)
    return Grouped(call, torch.cat([F.linear(row, gate_up[expert]) for row, expert in real]), is_real)


def _rows_in_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [M, K] with a scale for 128 numbers of a row: float8 [M, K], float32 [M, K / 128]."""
    parts = values.float().unflatten(1, (-1, _BLOCK))
    scales = parts.abs().amax(-1).clamp(min=1e-4) / _LARGEST
    return (parts / scales[..., None]).flatten(1).to(torch.float8_e4m3fn), scales


def _blocks_in_fp8(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [E, N, K] with a scale for 128 x 128 numbers: float8 [E, N, K], float32 [E, N / 128, K / 128]."""
    parts = matrices.float().unflatten(2, (-1, _BLOCK)).unflatten(1, (-1, _BLOCK))
    scales = parts.abs().amax((2, 4)).clamp(min=1e-4) / _LARGEST
    rounded = parts / scales[:, :, None, :, None]
    return rounded.flatten(3).flatten(1, 2).to(torch.float8_e4m3fn), scales
