"""SwiGLU's activation (Shazeer 2020, arXiv:2002.05202) for a fused gate and up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch

_BLOCK = 1024
"""Outputs per program."""


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, row_stride, stride, out_stride, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < inner
    gates = gate_up_ptr + row * row_stride + at * stride
    gate = tl.load(gates, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gates + inner * stride, mask=is_in, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * out_stride + at, result.to(out_ptr.dtype.element_ty), mask=is_in)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Map [N, 2 * inner] of any strides, gates before ups, to silu(gate) * up, [N, inner]; computed in float32."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = rows, triton.cdiv(inner, _BLOCK)
        launch(_silu_mul, grid, gate_up, out, *gate_up.stride(), out.stride(0), inner, BLOCK=_BLOCK)
    return out
