"""The activations of gated MLPs (Shazeer 2020, arXiv:2002.05202) for a fused gate and up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch

_BLOCK = 1024
"""Outputs per program."""


@triton.jit
def _gate_mul(
    gate_up_ptr, out_ptr, row_stride, stride, out_stride, inner, IS_GELU: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < inner
    gates = gate_up_ptr + row * row_stride + at * stride
    gate = tl.load(gates, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gates + inner * stride, mask=is_in, other=0.0).to(tl.float32)
    if IS_GELU:  # gate * (1 + tanh(z)) / 2 = gate / (1 + exp(-2 z)), z = sqrt(2 / pi) * (gate + 0.044715 gate^3)
        result = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    else:
        result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * out_stride + at, result.to(out_ptr.dtype.element_ty), mask=is_in)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Map [N, 2 * inner] of any strides, gates before ups, to silu(gate) * up, [N, inner]; computed in float32."""
    return _gated(gate_up, False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Map as `silu_mul` does, by GELU's tanh approximation."""
    return _gated(gate_up, True)


def _gated(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = rows, triton.cdiv(inner, _BLOCK)
        options = {"IS_GELU": is_gelu, "BLOCK": _BLOCK}
        launch(_gate_mul, grid, gate_up, out, *gate_up.stride(), out.stride(0), inner, **options)
    return out
