"""Advances the states of gated delta nets (`engine.models.delta_net`) in place, by one token each.

The kernel reads and writes each state once. In torch, the states of all rows are first gathered in a copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch
from engine.kernels.triton.tile import start

_VALUES = 32
"""Columns of a state per program: with 128 keys, 32 numbers for each of its threads."""


def advance_slots(
    slots: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
) -> torch.Tensor:
    """Implement `engine.models.delta_net.advance_slots`."""
    rows, heads, keys = query.shape
    values = value.shape[-1]
    width = min(_VALUES, triton.next_power_of_2(values))
    found = torch.empty_like(value, memory_format=torch.contiguous_format)
    launch(
        _advance,
        (rows, heads, triton.cdiv(values, width)),
        slots,
        sources,
        targets,
        *(part.contiguous() for part in (query, key, value, decay, strength)),
        found,
        heads,
        KEYS=keys,
        VALUES=values,
        BLOCK_KEYS=triton.next_power_of_2(keys),
        BLOCK_VALUES=width,
        num_warps=4,
    )
    return found


@triton.jit
def _advance(
    slots,
    sources,
    targets,
    query,
    key,
    value,
    decay,
    strength,
    found,
    num_heads,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    at = row.to(tl.int64) * num_heads + head
    k = tl.arange(0, BLOCK_KEYS)
    v = tl.program_id(2) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_key, is_value = k < KEYS, v < VALUES
    own = head * KEYS * VALUES + k[:, None] * VALUES + v[None, :]
    is_own = is_key[:, None] & is_value[None, :]
    size = num_heads * KEYS * VALUES  # of a slot
    state = tl.load(slots + tl.load(sources + row) * size + own, mask=is_own, other=0.0)
    keys = tl.load(key + at * KEYS + k, mask=is_key, other=0.0)
    queries = tl.load(query + at * KEYS + k, mask=is_key, other=0.0)
    values = tl.load(value + at * VALUES + v, mask=is_value, other=0.0)
    state *= tl.exp(tl.load(decay + at))
    learned = (values - tl.sum(state * keys[:, None], 0)) * tl.load(strength + at)
    state += keys[:, None] * learned[None, :]
    tl.store(slots + tl.load(targets + row) * size + own, state, mask=is_own)
    tl.store(found + at * VALUES + v, tl.sum(state * queries[:, None], 0), mask=is_value)
