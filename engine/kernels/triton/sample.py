"""The next token of each row of logits, without a sort. `engine/sampling/choose.py` says what is chosen.

    best     each chunk of a row: its largest logit, and where           [R, C]
    weigh    each chunk: what its tokens weigh, e^((x - best) / T)       [R, C]
    cut      rows with top-k or top-p: which tokens stay                 a cut, below
    weigh    those rows again: what stays
    draw     the chunk, then the token, that the noise falls on          [R]

What top-k and top-p keep is a cut in the order of logits: all tokens above a value, and the first few that equal
it. It is searched for among the bits of floats, read as integers of the same order: a pass over the row asks how
much lies above 16 of them, and narrows the range 17-fold. Weights and their sums are float64, and tokens are
cumulated in vocabulary order: how sums are rounded then hardly ever decides, and tokens are those of torch.

Nothing is asked of the host, and the launches are the same whatever rows ask for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

CHUNK = 4096
"""Tokens of a program, but when a cut is searched for."""
_TILE = tl.constexpr(1024)
"""Tokens looked at together in the search for a cut."""
_THRESHOLDS = tl.constexpr(16)
_LOWEST_KEY = tl.constexpr(-(2**31))


@dataclass(frozen=True, slots=True)
class Choices:
    """What each row is chosen by, on the device: [R] each."""

    seed: torch.Tensor
    """int64: the bits of an unsigned one."""
    inverse: torch.Tensor
    """float64: 1 / temperature, finite; 0: the likeliest token."""
    top_k: torch.Tensor
    """int32: 0: no limit."""
    top_p: torch.Tensor
    """float64, in (0, 1]."""
    min_p: torch.Tensor
    """float64, in [0, 1]."""
    draws: bool
    """Whether any row has a temperature."""
    cuts: bool
    """Whether any of those has top-k or top-p."""


def choose(logits: torch.Tensor, choices: Choices, positions: torch.Tensor) -> torch.Tensor:
    """int64 [R]: a token for each row of `logits`, float32 [R, V], of any row stride.

    -1 where the largest logit is NaN or infinite, as then no choice is valid.
    positions: int64 [R], tokens generated before: with the seed they say the noise.
    """
    rows, size = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits must be rows of float32, got {logits.dtype} with strides {logits.stride()}")
    chunks = triton.cdiv(size, CHUNK)
    parts = {"NUM_CHUNKS": chunks, "CHUNKS": triton.next_power_of_2(chunks), "CHUNK": CHUNK, "num_warps": 8}

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    best, at = empty(torch.float32, rows, chunks), empty(torch.int32, rows, chunks)
    sums, equals = empty(torch.float64, rows, chunks), empty(torch.int32, rows, chunks)
    cuts, tokens = empty(torch.int32, rows, 2), empty(torch.int64, rows)
    row, asked = (logits, logits.stride(0), size), (choices.inverse, choices.top_k, choices.top_p, choices.min_p)
    if rows:
        _best[rows, chunks](*row, best, at, **parts)
        if choices.draws:
            _weigh[rows, chunks](*row, *asked, best, cuts, sums, equals, HAS_CUTS=False, **parts)
        if choices.cuts:
            _cut[rows,](*row, *asked, best, sums, cuts, **(parts | {"num_warps": 16}))
            _weigh[rows, chunks](*row, *asked, best, cuts, sums, equals, HAS_CUTS=True, **parts)
        noise = choices.seed, positions
        _draw[rows,](*row, *asked, *noise, best, at, cuts, sums, equals, tokens, DRAWS=choices.draws, **parts)
    return tokens


def change(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    repetition: torch.Tensor,
    penalty: torch.Tensor,
    bias: torch.Tensor,
) -> None:
    """Change single logits in place: entry e, [E] each, is token `tokens[e]` of row `rows[e]`, int32; none twice.

    logits: float32 [R, V], of any row stride. A logit is divided by its repetition penalty, float32, or multiplied
    with it when negative; then the penalty is subtracted and the bias added; a bias of -inf forbids the token.
    """
    count, block = len(rows), 256
    if count:
        changes = rows, tokens, repetition, penalty, bias
        _change[triton.cdiv(count, block),](logits, logits.stride(0), *changes, count, BLOCK=block)


@triton.jit
def _change(
    logits_ptr, stride, rows_ptr, tokens_ptr, repetition_ptr, penalty_ptr, bias_ptr, count, BLOCK: tl.constexpr
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = entry < count
    row = tl.load(rows_ptr + entry, mask=is_in, other=0).to(tl.int64)
    at = logits_ptr + row * stride + tl.load(tokens_ptr + entry, mask=is_in, other=0)
    x = tl.load(at, mask=is_in, other=0.0)
    repetition = tl.load(repetition_ptr + entry, mask=is_in, other=1.0)
    bias = tl.load(bias_ptr + entry, mask=is_in, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x -= tl.load(penalty_ptr + entry, mask=is_in, other=0.0)
    x = tl.where(bias == float("-inf"), bias, x + bias)
    tl.store(at, x, mask=is_in)


@triton.jit
def _key(x):
    """int32 of a float32's order; of both zeros the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The float32 of a key."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, best, inverse):
    return tl.exp((x.to(tl.float64) - best.to(tl.float64)) * inverse)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """As engine/sampling/noise.py."""
    start = _mix(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    bits = _mix(start + (position.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _row_best(best_ptr, row, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """A row's largest logit; NaN if there is one. And whether it is finite."""
    chunk = tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf"))
    is_valid = tl.max((best != best).to(tl.int32), axis=0) == 0
    largest = tl.max(best, axis=0)
    return largest, is_valid & (tl.abs(largest) != float("inf"))


@triton.jit
def _is_cut(row, size, inverse_ptr, top_k_ptr, top_p_ptr):
    top_k = tl.load(top_k_ptr + row)
    limits = ((top_k > 0) & (top_k < size)) | (tl.load(top_p_ptr + row) < 1.0)
    return limits & (tl.load(inverse_ptr + row) > 0)


@triton.jit
def _best(
    logits_ptr, stride, size, best_ptr, at_ptr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + token, mask=token < size, other=float("-inf"))
    is_nan = x != x
    best = tl.max(tl.where(is_nan, float("-inf"), x), axis=0)
    at = tl.min(tl.where(x == best, token, size), axis=0)
    best = tl.where(tl.max(is_nan.to(tl.int32), axis=0) > 0, float("nan"), best)
    tl.store(best_ptr + row * NUM_CHUNKS + chunk, best)
    tl.store(at_ptr + row * NUM_CHUNKS + chunk, at)


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
    sums_ptr,  # of tokens above the cut
    equals_ptr,  # tokens that equal it
    HAS_CUTS: tl.constexpr,  # cuts are found: only rows that have one
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inverse = tl.load(inverse_ptr + row)
    best, is_valid = _row_best(best_ptr, row, NUM_CHUNKS, CHUNKS)
    is_cut = _is_cut(row, size, inverse_ptr, top_k_ptr, top_p_ptr)
    if is_valid & (inverse > 0) & (is_cut | (not HAS_CUTS)):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * stride + token, mask=token < size, other=float("-inf"))
        weights = _weight(x, best, inverse)
        if HAS_CUTS:
            cut = tl.load(cuts_ptr + 2 * row)
            keys = _key(x)
            equals = tl.sum(((keys == cut) & (token < size)).to(tl.int32), axis=0)
            tl.store(equals_ptr + row * NUM_CHUNKS + chunk, equals)
            weights = tl.where(keys > cut, weights, 0.0)
        # What top-p's share is of is not yet cut by min-p.
        least = tl.where(is_cut & (not HAS_CUTS), 0.0, tl.load(min_p_ptr + row))
        tl.store(sums_ptr + row * NUM_CHUNKS + chunk, tl.sum(tl.where(weights >= least, weights, 0.0), axis=0))


@triton.jit
def _amounts(
    logits,
    size,
    low,
    high,
    thresholds,
    best,
    inverse,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
    MANY: tl.constexpr,
):
    """For each of MANY thresholds, what the tokens of keys from it on, and from `low` until `high`, come to.

    float64: their number if COUNTS, else their weight.
    """
    amounts = tl.zeros((TILE, MANY), dtype=tl.float64)
    for start in range(0, size, TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(logits + token, mask=token < size, other=float("-inf"))
        keys = _key(x).to(tl.int64)
        is_in = (keys >= low) & (keys < high) & (token < size)
        if tl.max(is_in.to(tl.int32), axis=0) > 0:  # later passes find little
            each = is_in.to(tl.float64)
            if not COUNTS:
                each *= _weight(x, best, inverse)
            amounts += tl.where(keys[:, None] >= thresholds[None, :], each[:, None], 0.0)
    return tl.sum(amounts, axis=0)


@triton.jit
def _search(
    logits, size, wanted, low, high, best, inverse, COUNTS: tl.constexpr, TILE: tl.constexpr, MANY: tl.constexpr
):
    """The highest key from which on tokens come to `wanted`, and what those above it come to, which is less.

    It is looked for from `low`, which is taken for it if none is, until `high`, above all.
    """
    above = tl.zeros((), dtype=tl.float64)
    while high - low > 1:
        thresholds = low + ((high - low) * (tl.arange(0, MANY) + 1).to(tl.int64)) // (MANY + 1)
        amounts = above + _amounts(logits, size, low, high, thresholds, best, inverse, COUNTS, TILE, MANY)
        is_reached = (amounts >= wanted) | (thresholds <= low)
        above = tl.maximum(above, tl.max(tl.where(is_reached, 0.0, amounts), axis=0))
        high = tl.minimum(high, tl.min(tl.where(is_reached, high, thresholds), axis=0))
        low = tl.maximum(low, tl.max(tl.where(is_reached, thresholds, low), axis=0))
    return low, above


@triton.jit
def _cut(
    logits_ptr,
    stride,
    size,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    sums_ptr,
    cuts_ptr,  # [rows, 2]: a key, all tokens above stay; how many that equal it stay
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride
    inverse = tl.load(inverse_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    best, is_valid = _row_best(best_ptr, row, NUM_CHUNKS, CHUNKS)
    if is_valid & _is_cut(row, size, inverse_ptr, top_k_ptr, top_p_ptr):
        high = _key(best).to(tl.int64) + 1
        low = tl.full((), _LOWEST_KEY, tl.int64)
        ties = tl.zeros((), tl.int64) + size
        chunk = tl.arange(0, CHUNKS)
        sums = tl.load(sums_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=0.0)
        total = tl.sum(sums, axis=0)
        if (top_k > 0) & (top_k < size):
            wanted = top_k.to(tl.float64)
            low, above = _search(logits, size, wanted, low, high, best, inverse, True, _TILE, _THRESHOLDS)
            ties = top_k - above.to(tl.int64)
            if top_p < 1.0:
                kept = _amounts(logits, size, low + 1, high, low + tl.arange(1, 2), best, inverse, False, _TILE, 1)
                total = tl.sum(kept, axis=0)
                total += _weight(_value(low.to(tl.int32)), best, inverse) * ties.to(tl.float64)
        if top_p < 1.0:
            # Tokens below the bound weigh less than 1 - top_p together: no cut lies there.
            bound = best.to(tl.float64) + tl.log(0.999 * (1.0 - top_p) * total / size) / inverse
            bound = tl.maximum(bound, -3.4028234663852886e38).to(tl.float32)
            floor = tl.maximum(low, tl.minimum(_key(bound).to(tl.int64) - 1, high - 1))
            wanted = top_p * total
            key, above = _search(logits, size, wanted, floor, high, best, inverse, False, _TILE, _THRESHOLDS)
            each = tl.maximum(_weight(_value(key.to(tl.int32)), best, inverse), 1e-300)
            taken = tl.minimum(tl.maximum(tl.ceil((wanted - above) / each), 1.0), 1e9).to(tl.int64)
            ties = tl.where(key == low, tl.minimum(ties, taken), taken)
            low = key
        tl.store(cuts_ptr + 2 * row, low.to(tl.int32))
        tl.store(cuts_ptr + 2 * row + 1, ties.to(tl.int32))


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
):
    row = tl.program_id(0).to(tl.int64)
    best, is_valid = _row_best(best_ptr, row, NUM_CHUNKS, CHUNKS)
    chunk = tl.arange(0, CHUNKS)
    is_in = chunk < NUM_CHUNKS
    bests = tl.load(best_ptr + row * NUM_CHUNKS + chunk, mask=is_in, other=float("-inf"))
    ats = tl.load(at_ptr + row * NUM_CHUNKS + chunk, mask=is_in, other=size)
    result = tl.where(is_valid, tl.min(tl.where(bests == best, ats, size), axis=0), -1)
    if DRAWS:
        inverse = tl.load(inverse_ptr + row)
        if is_valid & (inverse > 0):
            is_cut = _is_cut(row, size, inverse_ptr, top_k_ptr, top_p_ptr)
            cut, ties, each = tl.full((), _LOWEST_KEY, tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.float64)
            sums = tl.load(sums_ptr + row * NUM_CHUNKS + chunk, mask=is_in, other=0.0)
            least = tl.load(min_p_ptr + row)
            before = tl.zeros((CHUNKS,), tl.int32)  # tokens that equal the cut, in chunks before
            if is_cut:
                cut, ties = tl.load(cuts_ptr + 2 * row), tl.load(cuts_ptr + 2 * row + 1)
                each = _weight(_value(cut), best, inverse)
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
            keys = _key(x)
            is_equal = (keys == cut) & (token < size)
            stays = (keys > cut) | (is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= ties))
            weights = _weight(x, best, inverse)
            weights = tl.where(stays & (weights >= least), weights, 0.0)
            passed = (tl.cumsum(weights, axis=0) + so_far > wanted) & (weights > 0)
            last = tl.max(tl.where(weights > 0, token, 0), axis=0)  # were sums rounded against each other
            result = tl.minimum(tl.min(tl.where(passed, token, size), axis=0), last)
    tl.store(tokens_ptr + row, result.to(tl.int64))
