"""Computes gated delta nets (`engine.models.delta_net`) for rows of one token each, in four launches:

    _strengths    decays and strengths from their gates, also of prompts
    _convolve     the convolution with the inputs that a slot keeps, SiLU, and the inputs that it keeps now
    _advance      unit norms of queries and keys, the state, and the queries' results
    _gate         their gated norm, also of prompts

A state is read and written once, in place. In torch, the states of all rows are first gathered in a copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import launch
from engine.kernels.triton.tile import start

_CHANNELS = 256
"""Channels of a convolution per program: at least one for each thread, which so overwrites only inputs that it has
read itself."""
_VALUES = 32
"""Columns of a state per program: with 128 keys, 32 numbers for each of its threads."""
_HEADS = 8
"""Heads of a gated norm per program."""


def strengths(
    gates: torch.Tensor, log_decay: torch.Tensor, decay_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `engine.models.native_delta_net.strengths`."""
    tokens, heads = len(gates), len(log_decay)
    decay, strength = (torch.empty((tokens, heads), device=gates.device) for _ in range(2))
    own = gates.contiguous(), log_decay, decay_bias, decay, strength
    launch(_strengths, (tokens,), *own, HEADS=heads, BLOCK=triton.next_power_of_2(heads), num_warps=1)
    return decay, strength


def convolve_decodes(
    mixed: torch.Tensor, conv: torch.Tensor, inputs: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the convolution's outputs after SiLU, [D, channels], and keep its last inputs for the next tokens.

    mixed: [D, channels]; conv: [channels, kernel]; inputs: those of all slots; sources, targets: int64 [D], each
    row's slots before and after its token; no row's target is another's source
    """
    rows, channels = mixed.shape
    found = torch.empty((rows, channels), dtype=mixed.dtype, device=mixed.device)
    launch(
        _convolve,
        (rows, triton.cdiv(channels, _CHANNELS)),
        mixed,
        inputs,
        sources.contiguous(),
        targets.contiguous(),
        conv,
        found,
        mixed.stride(0),
        channels,
        KERNEL=conv.shape[1],
        CHANNELS=_CHANNELS,
        num_warps=4,
    )
    return found


def advance_decodes(
    slots: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    convolved: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
) -> torch.Tensor:
    """Advance the states of D rows by one token each; return the queries' results, float32 [D, H, value_dim].

    slots: float32 [num_slots, H, key_dim, value_dim]; decay, strength: float32 [D, H]
    """
    _, heads, keys, values = slots.shape
    rows, channels = convolved.shape
    width = min(_VALUES, triton.next_power_of_2(values))
    found = torch.empty((rows, heads, values), device=slots.device)
    launch(
        _advance,
        (rows, heads, triton.cdiv(values, width)),
        slots,
        sources.contiguous(),
        targets.contiguous(),
        convolved,
        decay.contiguous(),
        strength.contiguous(),
        found,
        channels,
        heads,
        (channels - heads * values) // (2 * keys),
        KEYS=keys,
        VALUES=values,
        BLOCK_KEYS=triton.next_power_of_2(keys),
        BLOCK_VALUES=width,
        num_warps=4,
    )
    return found


def gated(found: torch.Tensor, z: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """Implement `engine.models.torch_delta_net.TorchDeltaHeads.gated`."""
    tokens, heads, values = found.shape
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    launch(
        _gate,
        (tokens, triton.cdiv(heads, _HEADS)),
        found.contiguous(),
        z,
        norm,
        out,
        z.stride(0),
        heads,
        eps,
        VALUES=values,
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(values),
        num_warps=4,
    )
    return out


@triton.jit
def _strengths(
    gates,
    log_decay,
    decay_bias,
    decay,
    strength,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_real = head < HEADS
    own = gates + token * 2 * HEADS + head
    x = tl.load(own + HEADS, mask=is_real, other=0.0).to(tl.float32)
    x += tl.load(decay_bias + head, mask=is_real, other=0.0).to(tl.float32)
    # softplus(x) = max(x, 0) + log(1 + e) with e = exp(-|x|). The sum rounds e; the quotient corrects that.
    e = tl.exp(-tl.abs(x))
    total = 1.0 + e
    rest = tl.where(total == 1.0, e, tl.log(total) * (e / tl.where(total == 1.0, 1.0, total - 1.0)))
    softplus = tl.maximum(x, 0.0) + rest
    rate = tl.exp(tl.load(log_decay + head, mask=is_real, other=0.0).to(tl.float32))
    at = token * HEADS + head
    tl.store(decay + at, -rate * softplus, mask=is_real)
    y = tl.load(own, mask=is_real, other=0.0).to(tl.float32)
    tl.store(strength + at, 1.0 / (1.0 + tl.exp(-y)), mask=is_real)


@triton.jit
def _convolve(
    mixed,
    inputs,
    sources,
    targets,
    conv,
    found,
    stride,
    channels,
    KERNEL: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_real = c < channels
    size = (KERNEL - 1) * channels  # of a slot
    old = inputs + tl.load(sources + row) * size + c
    kept = inputs + tl.load(targets + row) * size + c
    total = tl.zeros([CHANNELS], tl.float32)
    for tap in tl.static_range(KERNEL):
        place = old + tap * channels if tap < KERNEL - 1 else mixed + row * stride + c
        part = tl.load(place, mask=is_real, other=0.0)
        if tap > 0:  # The input in this place has been read.
            tl.store(kept + (tap - 1) * channels, part, mask=is_real)
        weight = tl.load(conv + c * KERNEL + tap, mask=is_real, other=0.0)
        total += part.to(tl.float32) * weight.to(tl.float32)
    tl.store(found + row * channels + c, total / (1.0 + tl.exp(-total)), mask=is_real)


@triton.jit
def _unit(places, is_real):
    """Load a vector and divide it by its length, as `engine.models.delta_net` does."""
    vector = tl.load(places, mask=is_real, other=0.0).to(tl.float32)
    return vector * tl.rsqrt(tl.sum(vector * vector, 0) + 1e-6)


@triton.jit
def _advance(
    slots,
    sources,
    targets,
    convolved,
    decay,
    strength,
    found,
    channels,
    num_heads,
    num_key_heads,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * num_heads + head
    k = tl.arange(0, BLOCK_KEYS)
    v = tl.program_id(2) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_key, is_value = k < KEYS, v < VALUES
    own = head * KEYS * VALUES + k[:, None] * VALUES + v[None, :]
    is_own = is_key[:, None] & is_value[None, :]
    size = num_heads * KEYS * VALUES  # of a slot
    state = tl.load(slots + tl.load(sources + row) * size + own, mask=is_own, other=0.0)
    of_row = convolved + row * channels
    of_key_head = of_row + head // (num_heads // num_key_heads) * KEYS + k
    query = _unit(of_key_head, is_key) * (1.0 / KEYS**0.5)
    key = _unit(of_key_head + num_key_heads * KEYS, is_key)
    of_values = of_row + 2 * num_key_heads * KEYS + head * VALUES + v
    value = tl.load(of_values, mask=is_value, other=0.0).to(tl.float32)
    state *= tl.exp(tl.load(decay + at))
    learned = (value - tl.sum(state * key[:, None], 0)) * tl.load(strength + at)
    state += key[:, None] * learned[None, :]
    tl.store(slots + tl.load(targets + row) * size + own, state, mask=is_own)
    tl.store(found + at * VALUES + v, tl.sum(state * query[:, None], 0), mask=is_value)


@triton.jit
def _gate(
    found,
    z,
    norm,
    out,
    stride,
    num_heads,
    eps,
    VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head, v = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    is_real = (head < num_heads)[:, None] & (v < VALUES)[None, :]
    own = head[:, None] * VALUES + v[None, :]
    at = token * num_heads * VALUES + own
    x = tl.load(found + at, mask=is_real, other=0.0)
    x *= tl.rsqrt(tl.sum(x * x, 1) / VALUES + eps)[:, None]
    x *= tl.load(norm + v, mask=v < VALUES, other=0.0).to(tl.float32)[None, :]
    gate = tl.load(z + token * stride + own, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out + at, x * gate / (1.0 + tl.exp(-gate)), mask=is_real)
