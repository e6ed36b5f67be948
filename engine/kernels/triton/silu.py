"""The activations of gated MLPs (Shazeer 2020, arXiv:2002.05202) for a fused gate and up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.fp8 import store_rounded
from engine.kernels.triton.launch import launch

_BLOCK = 1024
"""Outputs per program; a row that is rounded to float8 is one program's."""
_MAX_WARPS = 32


@triton.jit
def _gate_mul(
    gate_up_ptr,
    out_ptr,
    scale_ptr,
    row_stride,
    stride,
    out_stride,
    inner,
    IS_GELU: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
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
    out = out_ptr + row * out_stride + at
    if IS_ROUNDED:
        store_rounded(
            result.to(gate_up_ptr.dtype.element_ty).to(tl.float32), is_in, out, scale_ptr + row, INTERPRETED
        )
    else:
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=is_in)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Map [N, 2 * inner] of any strides, gates before ups, to silu(gate) * up, [N, inner]; computed in float32."""
    return _gated(gate_up, False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Map as `silu_mul` does, by GELU's tanh approximation."""
    return _gated(gate_up, True)


def gated_fp8(gate_up: torch.Tensor, *, is_gelu: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute as `silu_mul` or `gelu_mul`; return that rounded to float8_e4m3fn, and rows' scales, float32 [N]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=torch.float8_e4m3fn, device=gate_up.device)
    scale = torch.empty(rows, dtype=torch.float32, device=gate_up.device)
    block = triton.next_power_of_2(inner)
    _launch(gate_up, out, scale, is_gelu, block, min(max(block // 512, 1), _MAX_WARPS))
    return out, scale


def _gated(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    _launch(gate_up, out, None, is_gelu, _BLOCK, 4)
    return out


def _launch(
    gate_up: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None, is_gelu: bool, block: int, num_warps: int
) -> None:
    rows, inner = out.shape
    if rows:
        strides = *gate_up.stride(), out.stride(0)
        options = {
            "IS_GELU": is_gelu,
            "IS_ROUNDED": scale is not None,
            "INTERPRETED": not isinstance(_gate_mul, triton.JITFunction),
            "BLOCK": block,
            "num_warps": num_warps,
        }
        launch(_gate_mul, (rows, triton.cdiv(inner, block)), gate_up, out, scale, *strides, inner, **options)
