"""The activations of gated MLPs (Shazeer 2020, arXiv:2002.05202) for a fused gate and up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.fp8 import rounded_like, store_rounded
from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import power_of_2
from engine.kernels.triton.tile import start

_BLOCK = 1024
"""Outputs per program; a row that is rounded to float8 belongs to one program."""
_MAX_WARPS = 32


@triton.jit
def gelu(x):
    """Return GELU by its tanh approximation: x (1 + tanh(z)) / 2 = x / (1 + exp(-2 z)), with
    z = sqrt(2 / pi) (x + 0.044715 x^3).
    """
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _gate_mul(
    gate_up_ptr,
    out_ptr,
    scale_ptr,
    row_stride,
    stride,
    out_stride,
    inner,
    scales,
    IS_GELU: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    INPUTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < inner
    gates = gate_up_ptr + row * row_stride + at * stride
    gate = tl.load(gates, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gates + inner * stride, mask=is_in, other=0.0).to(tl.float32)
    result = gelu(gate) * up if IS_GELU else gate / (1.0 + tl.exp(-gate)) * up
    out = out_ptr + row * out_stride + at
    if IS_ROUNDED:
        rounded = result.to(gate_up_ptr.dtype.element_ty).to(tl.float32)
        store_rounded(rounded, is_in, out, scale_ptr + row * scales, INPUTS, INTERPRETED)
    else:
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=is_in)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Map [N, 2 * inner] of any strides, gates before ups, to silu(gate) * up, [N, inner]; computed in float32."""
    return _gated(gate_up, False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Map as `silu_mul` does, by GELU's tanh approximation."""
    return _gated(gate_up, True)


def gated_fp8(
    gate_up: torch.Tensor, inputs: int | None = None, *, is_gelu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute as `silu_mul` or `gelu_mul` does; return the rounded result and scales, as `round_rows` does."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out, scale, each = rounded_like(rows, inner, inputs or inner, gate_up.device)
    block = power_of_2(inner)
    _launch(gate_up, out, scale, each, is_gelu, block, min(max(block // 512, 1), _MAX_WARPS))
    return out, scale


def _gated(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    _launch(gate_up, out, None, 0, is_gelu, _BLOCK, 4)
    return out


def _launch(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    inputs: int,
    is_gelu: bool,
    block: int,
    num_warps: int,
) -> None:
    rows, inner = out.shape
    if rows:
        strides, scales = (*gate_up.stride(), out.stride(0)), 0 if scale is None else scale.stride(0)
        options = {
            "IS_GELU": is_gelu,
            "IS_ROUNDED": scale is not None,
            "INPUTS": inputs,
            "INTERPRETED": not isinstance(_gate_mul, triton.JITFunction),
            "BLOCK": block,
            "num_warps": num_warps,
        }
        launch(_gate_mul, (rows, -(-inner // block)), gate_up, out, scale, *strides, inner, scales, **options)
