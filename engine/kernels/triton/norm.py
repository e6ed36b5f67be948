"""Residual addition and RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467), with one program per row.

The row stays in registers between the two: it is read once and written twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.fp8 import rounded_like, store_rounded
from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import power_of_2
from engine.kernels.triton.tile import start


@triton.jit
def _add_norm(
    x_ptr,  # [rows, size], overwritten with the sum if there is a branch
    branch_ptr,
    weight_ptr,  # [size]
    out_ptr,  # [rows, size]
    scale_ptr,  # float32 [rows, scales] if the norm is rounded to float8
    x_stride,
    branch_stride,
    out_stride,
    scales,
    eps,
    SIZE: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    INPUTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_in = at < SIZE
    x = tl.load(x_ptr + row * x_stride + at, mask=is_in, other=0.0)
    if HAS_BRANCH:
        branch = tl.load(branch_ptr + row * branch_stride + at, mask=is_in, other=0.0)
        x = (x.to(tl.float32) + branch.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + at, x, mask=is_in)
    wide = x.to(tl.float32)  # The sum is rounded as if the norm had read it.
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    normed = wide * factor * weight
    out = out_ptr + row * out_stride + at
    if IS_ROUNDED:
        rounded = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
        store_rounded(rounded, is_in, out, scale_ptr + row * scales, INPUTS, INTERPRETED)
    else:
        tl.store(out, normed.to(out_ptr.dtype.element_ty), mask=is_in)


def add_norm(x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `branch`, if there is one, to `x` in place; return the normed sum. Both [N, size]; weight: [size].

    Rows may have any stride, but their numbers must be contiguous. They are added and normed in float32.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, branch, weight, out, None, 0, eps)
    return out


def add_norm_fp8(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float, inputs: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute as `add_norm` does; return its result rounded, and scales, as `round_rows` does."""
    rows, size = x.shape
    out, scale, each = rounded_like(rows, size, inputs or size, x.device)
    _launch(x, branch, weight, out, scale, each, eps)
    return out, scale


def _launch(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    inputs: int,
    eps: float,
) -> None:
    rows, size = x.shape
    _require_rows(x=x, branch=x if branch is None else branch)
    block = power_of_2(size)
    if rows:
        launch(
            _add_norm,
            (rows,),
            x,
            branch,
            weight,
            out,
            scale,
            x.stride(0),
            0 if branch is None else branch.stride(0),
            out.stride(0),
            0 if scale is None else scale.stride(0),
            eps,
            SIZE=size,
            HAS_BRANCH=branch is not None,
            IS_ROUNDED=scale is not None,
            INPUTS=inputs,
            INTERPRETED=not isinstance(_add_norm, triton.JITFunction),
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )


def _require_rows(**parts: torch.Tensor) -> None:
    for name, part in parts.items():
        if part.stride(1) != 1:
            raise ValueError(f"{name}: a row's numbers must be contiguous, but their stride is {part.stride(1)}")
