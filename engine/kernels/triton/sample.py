"""Samples the next token of each row of logits as `engine/sampling/distribution.py` does, but without a sort.

    best     each chunk of a row: its largest logit, and where           [R, C]
    weigh    each chunk: the weight of its tokens, e^((x - best) / T)    [R, C]
    (cut)    rows with top-k or top-p: `engine/kernels/triton/truncation.py`
    weigh    those rows again: the weight of the tokens that stay        [R, C]
    draw     the chunk, then the token, that the noise selects           [R]

Weights and their sums are float64, and tokens are cumulated in vocabulary order, so the rounding of sums hardly
ever decides, and tokens are the same as torch's.

The host is not involved, and the launches are the same for all sampling parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import empty_indices, launch
from engine.kernels.triton.launch_config import power_of_2
from engine.kernels.triton.tile import start
from engine.kernels.triton.truncation import (
    LOWEST_KEY,
    PASSES,
    THRESHOLDS,
    best_of_row,
    collect,
    find_bounds,
    find_cuts,
    has_cut,
    key_of,
    narrow,
    value_of,
    weight_of,
)

CHUNK = 4096
"""Tokens per program, except in the search for a cut."""
BLOCK = 64
"""Tokens that share a maximum: the k-th largest maximum is no larger than the k-th largest logit."""
ROOM = 128
"""Maximum number of tokens collected from a chunk; if there are more, the whole row is searched for a cut."""


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The rows' sampling parameters on the device: [R] each."""

    seed: torch.Tensor
    """int64: the bits of an unsigned integer."""
    inverse: torch.Tensor
    """float64: 1 / temperature, finite; 0 for greedy rows."""
    top_k: torch.Tensor
    """int32; 0 for no limit."""
    top_p: torch.Tensor
    """float64, in (0, 1]."""
    min_p: torch.Tensor
    """float64, in [0, 1]."""
    draws: bool
    """Whether any row has a temperature."""
    cuts: bool
    """Whether any row with a temperature has top-k or top-p."""


def choose(logits: torch.Tensor, tensors: SamplingTensors, positions: torch.Tensor) -> torch.Tensor:
    """Choose a token, int64 [R], for each row of `logits`, float32 [R, V], of any row stride.

    The token is -1 if the largest logit is NaN or infinite, because no choice is valid then.
    positions: int64 [R], numbers of tokens generated before, which determine the noise together with the seeds.
    """
    rows, size = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits must be rows of float32, got {logits.dtype} with strides {logits.stride()}")
    chunks = -(-size // CHUNK)
    parts: dict[str, Any] = {"NUM_CHUNKS": chunks, "CHUNKS": power_of_2(chunks), "CHUNK": CHUNK, "num_warps": 8}
    searching = parts | {"num_warps": 16}

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    best, at = empty(torch.float32, rows, chunks), empty(torch.int32, rows, chunks)
    sums, equals = empty(torch.float64, rows, chunks), empty(torch.int32, rows, chunks)
    cuts, tokens = empty(torch.int32, rows, 2), empty_indices(logits.device, rows)
    maxima = empty(torch.float32, rows, chunks, CHUNK // BLOCK) if tensors.cuts else None
    row, asked = (logits, logits.stride(0), size), (tensors.inverse, tensors.top_k, tensors.top_p, tensors.min_p)
    if not rows:
        return tokens
    launch(_best, (rows, chunks), *row, best, at, maxima, HAS_MAXIMA=tensors.cuts, BLOCK=BLOCK, **parts)
    if tensors.draws:
        launch(_weigh, (rows, chunks), *row, *asked, best, cuts, sums, equals, HAS_CUTS=False, **parts)
    if maxima is not None:
        found = empty(torch.int32, rows, PASSES + 1, 2), empty(torch.float64, rows, PASSES + 1)
        passed = empty(torch.float64, rows, PASSES, chunks, THRESHOLDS)
        candidates, counts = empty(torch.float32, rows, chunks, ROOM), empty(torch.int32, rows, chunks)
        weighed, by_row, each = (*row, *asked, best, sums, *found), (rows,), (rows, chunks)
        many = parts | {"PASSES": PASSES, "MANY": THRESHOLDS}
        launch(
            find_bounds, by_row, maxima, size, *asked, best, sums, *found, BLOCK=BLOCK, PASSES=PASSES, **searching
        )
        for number in range(PASSES):
            launch(narrow, each, *weighed, passed, PASS=number, **many)
        launch(collect, each, *weighed, passed, candidates, counts, ROOM=ROOM, **many)
        launch(find_cuts, by_row, *weighed, candidates, counts, cuts, ROOM=ROOM, PASSES=PASSES, **searching)
        launch(_weigh, (rows, chunks), *row, *asked, best, cuts, sums, equals, HAS_CUTS=True, **parts)
    noise = tensors.seed, positions
    launch(
        _draw, (rows,), *row, *asked, *noise, best, at, cuts, sums, equals, tokens, DRAWS=tensors.draws, **parts
    )
    return tokens


def penalize(logits: torch.Tensor, counts: torch.Tensor, asked: torch.Tensor) -> None:
    """Apply penalties in place to P rows of `logits`, float32 [R, V], of any row stride.

    counts: int32 [slots, V], as in `engine.sampling.token_counts`.
    asked: int64 [P, 5 + T]: each one's row and slot; the bits of its repetition, presence and frequency penalties
    as float64; tokens of its output that the slot does not count, padded with -1.
    """
    if asked.shape[0]:
        grid = (asked.shape[0], -(-logits.shape[1] // CHUNK))
        shape = logits.stride(0), logits.shape[1]
        launch(_penalize, grid, logits, *shape, counts, asked, asked.shape[1], CHUNK=CHUNK)


def edit(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor) -> None:
    """Change single logits in place: add `bias[e]`, float32, to token `tokens[e]` of row `rows[e]`, int32.

    logits: float32 [R, V], of any row stride. There are no duplicates; a bias of -inf forbids the token.
    """
    count, block = len(rows), 256
    if count:
        grid = (-(-count // block),)
        launch(_edit, grid, logits, logits.stride(0), rows, tokens, bias, count, BLOCK=block)


@triton.jit(do_not_specialize=["width"])
def _penalize(logits_ptr, stride, size, counts_ptr, asked_ptr, width, CHUNK: tl.constexpr):
    asked = asked_ptr + tl.program_id(0).to(tl.int64) * width
    row, slot = tl.load(asked), tl.load(asked + 1)
    repetition = tl.load(asked + 2).to(tl.float64, bitcast=True).to(tl.float32)
    presence = tl.load(asked + 3).to(tl.float64, bitcast=True)
    frequency = tl.load(asked + 4).to(tl.float64, bitcast=True)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    count = tl.load(counts_ptr + slot * size + token, mask=token < size, other=0)
    for index in range(5, width):
        count += tl.where((token == tl.load(asked + index)) & (token < size), 2, 0)
    x = tl.load(logits_ptr + row * stride + token, mask=count > 0, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    penalty = (presence + frequency * (count >> 1).to(tl.float64)).to(tl.float32)
    x = tl.where(count > 1, x - penalty, x)
    tl.store(logits_ptr + row * stride + token, x, mask=count > 0)


@triton.jit(do_not_specialize=["rows_ptr", "tokens_ptr", "bias_ptr", "count"])
def _edit(logits_ptr, stride, rows_ptr, tokens_ptr, bias_ptr, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = entry < count
    row = tl.load(rows_ptr + entry, mask=is_in, other=0).to(tl.int64)
    at = logits_ptr + row * stride + tl.load(tokens_ptr + entry, mask=is_in, other=0)
    bias = tl.load(bias_ptr + entry, mask=is_in, other=0.0)
    x = tl.load(at, mask=is_in, other=0.0)
    tl.store(at, tl.where(bias == float("-inf"), bias, x + bias), mask=is_in)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """Compute `engine.sampling.noise.uniform`."""
    start = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    bits = _mix(start + (position.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _best(
    logits_ptr,
    stride,
    size,
    best_ptr,
    at_ptr,
    maxima_ptr,  # [rows, chunks, CHUNK / BLOCK]
    HAS_MAXIMA: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + token, mask=token < size, other=float("-inf"))
    is_nan = x != x
    best = tl.max(tl.where(is_nan, float("-inf"), x), axis=0)
    at = tl.min(tl.where(x == best, token, size), axis=0)
    best = tl.where(tl.max(is_nan.to(tl.int32), axis=0) > 0, float("nan"), best)
    tl.store(best_ptr + row * NUM_CHUNKS + chunk, best)
    tl.store(at_ptr + row * NUM_CHUNKS + chunk, at)
    if HAS_MAXIMA:
        blocks: tl.constexpr = CHUNK // BLOCK
        maxima = tl.max(tl.reshape(x, (blocks, BLOCK)), axis=1)
        tl.store(maxima_ptr + (row * NUM_CHUNKS + chunk) * blocks + tl.arange(0, blocks), maxima)


@triton.jit
def _weigh(
    logits_ptr,
    stride,
    size,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    cuts_ptr,
    sums_ptr,  # weights of tokens above the cut
    equals_ptr,  # numbers of tokens that equal the cut
    HAS_CUTS: tl.constexpr,  # whether cuts are known; then only rows with one are computed
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inverse = tl.load(inverse_ptr + row)
    best, is_valid = best_of_row(best_ptr, row, NUM_CHUNKS, CHUNKS)
    is_cut = has_cut(row, size, inverse_ptr, top_k_ptr, top_p_ptr)
    if is_valid & (inverse > 0) & (is_cut | (not HAS_CUTS)):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * stride + token, mask=token < size, other=float("-inf"))
        weights = weight_of(x, best, inverse)
        if HAS_CUTS:
            cut = tl.load(cuts_ptr + 2 * row)
            keys = key_of(x)
            equals = tl.sum(((keys == cut) & (token < size)).to(tl.int32), axis=0)
            tl.store(equals_ptr + row * NUM_CHUNKS + chunk, equals)
            weights = tl.where(keys > cut, weights, 0.0)
        # Top-p is a share of the weights before min-p.
        least = tl.where(is_cut & (not HAS_CUTS), 0.0, tl.load(min_p_ptr + row))
        tl.store(sums_ptr + row * NUM_CHUNKS + chunk, tl.sum(tl.where(weights >= least, weights, 0.0), axis=0))


@triton.jit
def _draw(
    logits_ptr,
    stride,
    size,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    best_ptr,
    at_ptr,
    cuts_ptr,
    sums_ptr,
    equals_ptr,
    tokens_ptr,
    DRAWS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    best, is_valid = best_of_row(best_ptr, row, NUM_CHUNKS, CHUNKS)
    chunk = tl.arange(0, CHUNKS)
    is_in = chunk < NUM_CHUNKS
    bests = tl.load(best_ptr + row * NUM_CHUNKS + chunk, mask=is_in, other=float("-inf"))
    ats = tl.load(at_ptr + row * NUM_CHUNKS + chunk, mask=is_in, other=size)
    result = tl.where(is_valid, tl.min(tl.where(bests == best, ats, size), axis=0), -1)
    if DRAWS:
        inverse = tl.load(inverse_ptr + row)
        if is_valid & (inverse > 0):
            is_cut = has_cut(row, size, inverse_ptr, top_k_ptr, top_p_ptr)
            cut, ties, each = tl.full((), LOWEST_KEY, tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.float64)
            sums = tl.load(sums_ptr + row * NUM_CHUNKS + chunk, mask=is_in, other=0.0)
            least = tl.load(min_p_ptr + row)
            before = tl.zeros((CHUNKS,), tl.int32)  # Tokens that equal the cut in earlier chunks.
            if is_cut:
                cut, ties = tl.load(cuts_ptr + 2 * row), tl.load(cuts_ptr + 2 * row + 1)
                each = weight_of(value_of(cut), best, inverse)
                each = tl.where(each >= least, each, 0.0)
                equals = tl.load(equals_ptr + row * NUM_CHUNKS + chunk, mask=is_in, other=0)
                before = tl.cumsum(equals, axis=0) - equals
                sums += each * tl.minimum(tl.maximum(ties - before, 0), equals).to(tl.float64)
            cumulated = tl.cumsum(sums, axis=0)
            total = tl.max(cumulated, axis=0)
            # Rounding may lift noise * total to the total itself, which no token exceeds.
            below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
            noise = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
            wanted = tl.minimum(noise * total, below)
            there = tl.min(tl.where(cumulated > wanted, chunk, NUM_CHUNKS - 1), axis=0)
            so_far = tl.sum(tl.where(chunk == there, cumulated - sums, 0.0), axis=0)
            ties -= tl.sum(tl.where(chunk == there, before, 0), axis=0)

            token = there * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits_ptr + row * stride + token, mask=token < size, other=float("-inf"))
            keys = key_of(x)
            is_equal = (keys == cut) & (token < size)
            stays = (keys > cut) | (is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= ties))
            weights = weight_of(x, best, inverse)
            weights = tl.where(stays & (weights >= least), weights, 0.0)
            passed = (tl.cumsum(weights, axis=0) + so_far > wanted) & (weights > 0)
            last = tl.max(tl.where(weights > 0, token, 0), axis=0)  # Rounding may make the sums disagree.
            result = tl.minimum(tl.min(tl.where(passed, token, size), axis=0), last)
    tl.store(tokens_ptr + row, result.to(tl.int64))
