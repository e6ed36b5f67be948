"""Computes gated delta nets (`engine.models.delta_net`) for many tokens of a row: prompts and draft tokens.

Tokens of all rows are computed in pieces (`engine.kernels.delta_pieces.StatePieces`), by three kernels:

    _convolve    all pieces in parallel          queries, keys and values
    _learn       all pieces in parallel          what tokens learn without a state, and recall of one
    _advance     the pieces of a row in turn     state ─▶ piece ─▶ state ─▶ piece ─▶ ..., and the queries' results

They compute the form in chunks of Yang et al. 2024 (arXiv:2412.06464), section 3.3. With L the unit lower
triangular system of a piece, Q, K and V its queries, keys and values, each with the decays and strengths that
`engine.models.torch_delta_net` gives them, and S the state before it:

    learned = L⁻¹ V - (L⁻¹ K) S        results = Q S + (Q Kᵀ) learned        S ← exp(g) S + Kᵀ learned
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.delta_pieces import PIECE, StatePieces
from engine.kernels.triton.launch import launch
from engine.kernels.triton.tile import start

_CHANNELS = 128
"""Channels of a convolution per program."""
_VALUES = 32
"""Columns of a state per program: a row's pieces take turns, so programs are few."""


def convolve(
    mixed: torch.Tensor, conv: torch.Tensor, inputs: torch.Tensor, pieces: StatePieces
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the convolution's outputs after SiLU, [T, channels], and the last inputs before each kept state,
    [K, kernel - 1, channels].

    mixed: [T, channels], the tokens of all rows; conv: [channels, kernel]; inputs: those of all slots
    """
    num_tokens, channels = mixed.shape
    kernel = conv.shape[1]
    found = torch.empty((num_tokens, channels), dtype=mixed.dtype, device=mixed.device)
    kept = torch.empty((len(pieces.kept), kernel - 1, channels), dtype=mixed.dtype, device=mixed.device)
    blocks = triton.cdiv(channels, _CHANNELS)
    own = inputs, pieces.rows, channels, mixed.stride(0)
    sizes = {"KERNEL": kernel, "CHANNELS": _CHANNELS}
    launch(_convolve, (len(pieces.pieces), blocks), mixed, pieces.pieces, *own, conv, found, PIECE=PIECE, **sizes)
    width = triton.next_power_of_2(kernel - 1)
    launch(_keep, (len(pieces.kept), blocks), mixed, pieces.kept, *own, kept, TAPS=width, **sizes)
    return found, kept


def advance_rows(
    slots: torch.Tensor, convolved: torch.Tensor, decay: torch.Tensor, strength: torch.Tensor, pieces: StatePieces
) -> torch.Tensor:
    """Advance the states of all rows, and keep them where `pieces` says; return float32 [T, H, value_dim].

    slots: float32 [num_slots, H, key_dim, value_dim]; convolved: [T, channels]; decay, strength: float32 [T, H]
    """
    _, heads, keys, values = slots.shape
    num_tokens, channels = convolved.shape
    num_key_heads = (channels - heads * values) // (2 * keys)
    found, learned = (torch.empty((num_tokens, heads, values), device=slots.device) for _ in range(2))
    recalled = torch.empty((num_tokens, heads, keys), device=slots.device)
    inputs = convolved, decay, strength, pieces.pieces
    of_model = channels, heads, num_key_heads
    width = min(_VALUES, triton.next_power_of_2(values))
    sizes = {"KEYS": keys, "VALUES": values, "BLOCK_KEYS": max(16, triton.next_power_of_2(keys)), "PIECE": PIECE}
    # TF32 has the digits of float16; three products in it have nearly those of float32.
    is_wide = convolved.dtype == torch.float32
    sizes["PRECISION"] = "tf32x3" if is_wide else "tf32"
    launch(
        _learn,
        (len(pieces.pieces), heads),
        *inputs,
        learned,
        recalled,
        *of_model,
        BLOCK_VALUES=max(16, triton.next_power_of_2(values)),
        **sizes,
    )
    launch(
        _advance,
        (len(pieces.rows), heads, triton.cdiv(values, width)),
        *inputs,
        learned,
        recalled,
        pieces.rows,
        slots,
        found,
        *of_model,
        BLOCK_VALUES=max(16, width),
        num_stages=1 if is_wide else 2,  # With more, the shared memory of an L40S does not suffice.
        **sizes,
    )
    return found


@triton.jit
def _inputs_at(mixed, inputs, at, begin, source, channels, stride, c, is_real, KERNEL: tl.constexpr):
    """Load inputs of a row: of its tokens, counted over all rows, or before its first one those of its state."""
    is_token = (at >= begin)[:, None]
    new = tl.load(mixed + at[:, None] * stride + c[None, :], mask=is_real & is_token, other=0.0)
    place = source * (KERNEL - 1) + KERNEL - 1 + at - begin
    old = tl.load(inputs + place[:, None] * channels + c[None, :], mask=is_real & ~is_token, other=0.0)
    return tl.where(is_token, new, old)


@triton.jit
def _convolve(
    mixed,
    pieces,
    inputs,
    rows,
    channels,
    stride,
    conv,
    found,
    PIECE: tl.constexpr,
    KERNEL: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    piece = pieces + tl.program_id(0) * 4
    first, length, row = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    begin, source = tl.load(rows + row * 4), tl.load(rows + row * 4 + 1)
    t = tl.arange(0, PIECE)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_real = (t < length)[:, None] & (c < channels)[None, :]
    total = tl.zeros([PIECE, CHANNELS], tl.float32)
    for tap in tl.static_range(KERNEL):
        at = first + t + (tap - (KERNEL - 1))
        part = _inputs_at(mixed, inputs, at, begin, source, channels, stride, c, is_real, KERNEL)
        weight = tl.load(conv + c * KERNEL + tap, mask=c < channels, other=0.0)
        total += part.to(tl.float32) * weight[None, :].to(tl.float32)
    total = total / (1.0 + tl.exp(-total))
    tl.store(found + (first + t)[:, None] * channels + c[None, :], total, mask=is_real)


@triton.jit
def _keep(
    mixed,
    kept,
    inputs,
    rows,
    channels,
    stride,
    found,
    TAPS: tl.constexpr,
    KERNEL: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    number = tl.program_id(0).to(tl.int64)
    row, end = tl.load(kept + number * 3), tl.load(kept + number * 3 + 1)
    begin, source = tl.load(rows + row * 4), tl.load(rows + row * 4 + 1)
    t = tl.arange(0, TAPS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_real = (t < KERNEL - 1)[:, None] & (c < channels)[None, :]
    part = _inputs_at(mixed, inputs, end - (KERNEL - 1) + t, begin, source, channels, stride, c, is_real, KERNEL)
    tl.store(found + (number * (KERNEL - 1) + t)[:, None] * channels + c[None, :], part, mask=is_real)


@triton.jit
def _unit(places, is_real):
    """Load vectors and divide them by their lengths, as `engine.models.delta_net` does."""
    heads = tl.load(places, mask=is_real, other=0.0).to(tl.float32)
    return heads * tl.rsqrt(tl.sum(heads * heads, 1) + 1e-6)[:, None]


@triton.jit
def _between(total, later):
    """Return the decay from each token (columns) to each later one (rows), and 0 from others."""
    return tl.exp(tl.where(later, total[:, None] - total[None, :], float("-inf")))


@triton.jit
def _learn(
    convolved,
    decay,
    strength,
    pieces,
    learned,
    recalled,
    channels,
    num_heads,
    num_key_heads,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    piece, head = pieces + tl.program_id(0) * 4, tl.program_id(1)
    first, length = tl.load(piece), tl.load(piece + 1)
    t, k, v = tl.arange(0, PIECE), tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_VALUES)
    is_token = t < length
    is_key, is_value = is_token[:, None] & (k < KEYS)[None, :], is_token[:, None] & (v < VALUES)[None, :]
    at = first + t
    gates = at * num_heads + head
    total = tl.cumsum(tl.load(decay + gates, mask=is_token, other=0.0), 0)
    taught = tl.load(strength + gates, mask=is_token, other=0.0)[:, None]
    own_keys = (num_key_heads + head // (num_heads // num_key_heads)) * KEYS
    key = _unit(convolved + at[:, None] * channels + own_keys + k[None, :], is_key)
    system = tl.dot(key * taught, tl.trans(key), input_precision=PRECISION)
    system *= _between(total, t[:, None] > t[None, :])
    # Row by row: a token's update depends on those before it.
    inverse = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    for row in range(1, length):
        weights = tl.sum(tl.where((t == row)[:, None], system, 0.0), 0)
        update = tl.sum(weights[:, None] * inverse, 0)
        inverse -= tl.where((t == row)[:, None], update[None, :], 0.0)
    own_values = 2 * num_key_heads * KEYS + head * VALUES
    value = tl.load(convolved + at[:, None] * channels + own_values + v[None, :], mask=is_value, other=0.0)
    result = tl.dot(inverse, value.to(tl.float32) * taught, input_precision=PRECISION)
    tl.store(learned + gates[:, None] * VALUES + v[None, :], result, mask=is_value)
    result = tl.dot(inverse, key * taught * tl.exp(total)[:, None], input_precision=PRECISION)
    tl.store(recalled + gates[:, None] * KEYS + k[None, :], result, mask=is_key)


@triton.jit
def _advance(
    convolved,
    decay,
    strength,
    pieces,
    learned,
    recalled,
    rows,
    slots,
    found,
    channels,
    num_heads,
    num_key_heads,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row, head = rows + tl.program_id(0) * 4, tl.program_id(1)
    source, begin, end = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    t, k = tl.arange(0, PIECE), tl.arange(0, BLOCK_KEYS)
    v = tl.program_id(2) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_own = (k < KEYS)[:, None] & (v < VALUES)[None, :]
    own = head * KEYS * VALUES + k[:, None] * VALUES + v[None, :]
    size = num_heads * KEYS * VALUES  # of a slot
    of_head = head // (num_heads // num_key_heads) * KEYS
    state = tl.load(slots + source * size + own, mask=is_own, other=0.0)
    for piece in range(begin, end):
        first, length = tl.load(pieces + piece * 4), tl.load(pieces + piece * 4 + 1)
        is_token = t < length
        is_key, is_value = is_token[:, None] & (k < KEYS)[None, :], is_token[:, None] & (v < VALUES)[None, :]
        at = first + t
        gates = at * num_heads + head
        decays = tl.load(decay + gates, mask=is_token, other=0.0)
        total, last = tl.cumsum(decays, 0), tl.sum(decays, 0)
        places = convolved + at[:, None] * channels + of_head + k[None, :]
        query = _unit(places, is_key) * (1.0 / KEYS**0.5)
        key = _unit(places + num_key_heads * KEYS, is_key)
        earlier = tl.load(recalled + gates[:, None] * KEYS + k[None, :], mask=is_key, other=0.0)
        update = tl.load(learned + gates[:, None] * VALUES + v[None, :], mask=is_value, other=0.0)
        update -= tl.dot(earlier, state, input_precision=PRECISION)
        within = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        within *= _between(total, t[:, None] >= t[None, :])
        result = tl.dot(query * tl.exp(total)[:, None], state, input_precision=PRECISION)
        result += tl.dot(within, update, input_precision=PRECISION)
        tl.store(found + gates[:, None] * VALUES + v[None, :], result, mask=is_value)
        state *= tl.exp(last)
        state += tl.dot(tl.trans(key * tl.exp(last - total)[:, None]), update, input_precision=PRECISION)
        slot = tl.load(pieces + piece * 4 + 3)
        if slot >= 0:
            tl.store(slots + slot * size + own, state, mask=is_own)
