"""The sum of all ranks' parts, residual addition and RMS norm in one kernel, over memory that all ranks can read.

    part ─▶ own memory ─▶ signal the others ─▶ wait for them ─▶ sum of all parts ─▶ + x ─▶ norm (─▶ float8)

Each program has its own rows, and waits only for the programs with the same number on the other ranks. Parts of
even and odd calls are separate: the signal of a call means that the one before was read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.fp8 import rounded_like, store_rounded
from engine.kernels.triton.launch import launch
from engine.kernels.triton.launch_config import power_of_2


@triton.jit(do_not_specialize=["rows", "max_bytes"])
def _sum_add_norm(
    x_ptr,  # [rows, SIZE], overwritten with the sum
    part_ptr,  # [rows, SIZE]
    weight_ptr,  # [SIZE]
    out_ptr,  # [rows, SIZE]
    scale_ptr,  # float32 [rows, scales] if the norm is rounded to float8
    addresses_ptr,  # int64 [NUM_RANKS]
    calls_ptr,  # int64 [programs], of earlier calls
    x_stride,
    part_stride,
    scales,
    rows,
    max_bytes,
    eps,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SIGNAL_BYTES: tl.constexpr,
    SIZE: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    INPUTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    call = tl.load(calls_ptr + program) + 1
    at = tl.arange(0, BLOCK)
    is_in = at < SIZE
    begin = SIGNAL_BYTES + (call & 1) * max_bytes
    kind = part_ptr.dtype
    own = tl.load(addresses_ptr + RANK)
    for row in range(program, rows, num_programs):
        part = tl.load(part_ptr + row * part_stride + at, mask=is_in, other=0.0)
        tl.store((own + begin).to(kind, bitcast=True) + row * SIZE + at, part, mask=is_in)
    tl.debug_barrier()  # All threads have written before one signals it.
    for other in tl.static_range(NUM_RANKS):
        if other != RANK:
            signals = tl.load(addresses_ptr + other).to(calls_ptr.dtype, bitcast=True)
            tl.atomic_xchg(signals + program * NUM_RANKS + RANK, call, sem="release", scope="sys")
    for other in tl.static_range(NUM_RANKS):
        if other != RANK:
            signal = own.to(calls_ptr.dtype, bitcast=True) + program * NUM_RANKS + other
            heard = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
            while heard < call:
                heard = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    weight = tl.load(weight_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    for row in range(program, rows, num_programs):
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(NUM_RANKS):
            parts = (tl.load(addresses_ptr + rank) + begin).to(kind, bitcast=True)
            total += tl.load(parts + row * SIZE + at, mask=is_in, other=0.0, cache_modifier=".cg").to(tl.float32)
        place = x_ptr + row * x_stride + at
        total = total.to(x_ptr.dtype.element_ty).to(tl.float32)  # rounded like a separate sum
        x = (tl.load(place, mask=is_in, other=0.0).to(tl.float32) + total).to(x_ptr.dtype.element_ty)
        tl.store(place, x, mask=is_in)
        wide = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
        normed = wide * factor * weight
        out = out_ptr + row * SIZE + at
        if IS_ROUNDED:
            rounded = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
            store_rounded(rounded, is_in, out, scale_ptr + row * scales, INPUTS, INTERPRETED)
        else:
            tl.store(out, normed.to(out_ptr.dtype.element_ty), mask=is_in)
    tl.store(calls_ptr + program, call)


def sum_add_norm(
    x: torch.Tensor,
    part: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    addresses: torch.Tensor,
    calls: torch.Tensor,
    rank: int,
    num_ranks: int,
    max_bytes: int,
    inputs: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add all ranks' `part` to `x` in place; return the normed sum, and None. All are [N, size], weight [size].

    With `inputs`, the norm is rounded to float8, and the second result has a scale for so many numbers each, as in
    `round_rows`.

    addresses: int64 [num_ranks], of each rank's memory, in the layout of `OneShotSum`
    calls: int64, the number of sums that each program has computed, counted by the kernel
    max_bytes: bytes of the memory for one call's part
    """
    rows, size = part.shape
    out, scale, each = torch.empty((rows, size), dtype=x.dtype, device=x.device), None, 0
    if inputs:
        out, scale, each = rounded_like(rows, size, inputs, x.device)
    block = power_of_2(size)
    if rows:
        launch(
            _sum_add_norm,
            (min(rows, len(calls)),),
            x,
            part,
            weight,
            out,
            scale,
            addresses,
            calls,
            x.stride(0),
            part.stride(0),
            0 if scale is None else scale.stride(0),
            rows,
            max_bytes,
            eps,
            RANK=rank,
            NUM_RANKS=num_ranks,
            SIGNAL_BYTES=calls.nbytes * num_ranks,
            SIZE=size,
            IS_ROUNDED=scale is not None,
            INPUTS=each,
            INTERPRETED=not isinstance(_sum_add_norm, triton.JITFunction),
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return out, scale
