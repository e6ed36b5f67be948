"""Sums the shares of a product that several programs have computed, in the last of them, without another launch.

    share 0 ─▶ partial 0 ┐
    share 1 ─▶ partial 1 ├─ the program that arrives last sums all of them, in their order ─▶ result
    share 2 ─▶ partial 2 ┘

Results thus do not depend on the order of programs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

PROGRAMS = 264
"""Wanted number of concurrent programs, two per multiprocessor of an H100: products are divided to reach it."""
_TILES = 65_536
"""Number of tiles of results that have counters."""


@functools.cache
def counters(device: torch.device) -> torch.Tensor:
    """Return int32 zeros, in which programs count their arrivals; they are zeros again after each product.

    Products follow each other on one stream, so that all of a device share these.
    """
    return torch.zeros(_TILES, dtype=torch.int32, device=device)


def num_shares(tiles: int, steps: int) -> int:
    """Return into how many shares the `steps` of each of so many tiles are divided. It does not depend on rows, so
    that a row is summed the same way in all batches.
    """
    return max(1, min(steps, PROGRAMS // max(tiles, 1)))


@triton.jit
def sum_shares(total, places, is_real, partial, size, arrived, share, SHARES: tl.constexpr):
    """Return the sum of all shares, and whether this program has it; others must not write a result.

    total: float32, with the shape of `places` and `is_real`: its numbers' places in a share of `size` numbers
    partial: float32 [SHARES, size]; arrived: this tile's counter
    """
    is_last = True
    if SHARES > 1:
        tl.store(partial + tl.cast(share, tl.int64) * size + places, total, mask=is_real)
        tl.debug_barrier()  # All threads have written before one signals it.
        is_last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == SHARES - 1
        tl.debug_barrier()
        if is_last:
            tl.store(arrived, 0)
            total = tl.zeros(total.shape, tl.float32)
            for other in range(SHARES):
                at = partial + tl.cast(other, tl.int64) * size + places
                # Bypass the nearest cache, which may hold old numbers.
                total += tl.load(at, mask=is_real, other=0.0, cache_modifier=".cg")
    return total, is_last
