"""Finds the tokens that top-k and top-p keep of rows of logits, without a sort.

    bounds   a value: no token below it stays, and few are above it      [R]
    collect  the tokens from the bound on                                [R, C, few]
    cuts     among these, or in the whole row if there are too many      [R]

A cut is a place in the order of logits: all tokens above a value stay, and the first few that equal it. The search
reads the bits of floats as integers of the same order ("keys"): a pass over the tokens sums what is above each of
16 thresholds, and narrows the range 17-fold. Rows without a cut are not touched.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-(2**31))
_TILE = tl.constexpr(1024)
"""Tokens examined together in the search."""
_THRESHOLDS = tl.constexpr(16)


@triton.jit
def key_of(x):
    """Return an int32 with a float32's order; both zeros have the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Return the float32 of a key."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, best, inverse):
    """Return e^((x - best) / temperature), in float64."""
    return tl.exp((x.to(tl.float64) - best.to(tl.float64)) * inverse)


@triton.jit
def best_of_row(best_ptr, row, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return a row's largest logit, NaN if there is one, and whether it is finite."""
    chunk = tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf"))
    is_valid = tl.max((best != best).to(tl.int32), axis=0) == 0
    largest = tl.max(best, axis=0)
    return largest, is_valid & (tl.abs(largest) != float("inf"))


@triton.jit
def has_cut(row, size, inverse_ptr, top_k_ptr, top_p_ptr):
    """Whether top-k or top-p removes anything from a row."""
    top_k = tl.load(top_k_ptr + row)
    limits = ((top_k > 0) & (top_k < size)) | (tl.load(top_p_ptr + row) < 1.0)
    return limits & (tl.load(inverse_ptr + row) > 0)


@triton.jit
def _sum_of_row(sums_ptr, row, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(sums_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=0.0), axis=0)


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
    """For each of MANY thresholds, add up those of `size` logits that reach it and are in low .. high - 1.

    Returns float64: their number if COUNTS, else their weight.
    """
    amounts = tl.zeros((TILE, MANY), dtype=tl.float64)
    for start in range(0, size, TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(logits + token, mask=token < size, other=float("-inf"))
        keys = key_of(x).to(tl.int64)
        is_in = (keys >= low) & (keys < high) & (token < size)
        if tl.max(is_in.to(tl.int32), axis=0) > 0:  # later passes find little
            each = is_in.to(tl.float64)
            if not COUNTS:
                each *= weight_of(x, best, inverse)
            amounts += tl.where(keys[:, None] >= thresholds[None, :], each[:, None], 0.0)
    return tl.sum(amounts, axis=0)


@triton.jit
def _search(
    logits, size, wanted, low, high, best, inverse, COUNTS: tl.constexpr, TILE: tl.constexpr, MANY: tl.constexpr
):
    """Return the highest key from which on `size` logits add up to `wanted`, and the sum of those above it.

    Searches from `low`, the result if there is no such key, to `high`, which is above all keys.
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
def find_bounds(
    maxima_ptr,  # [rows, chunks, CHUNK / BLOCK]: the largest logit of each block
    size,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    sums_ptr,
    bounds_ptr,  # [rows]: a key that is not above the cut of top-k, or of top-p if there is no top-k
    BLOCK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(inverse_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    best, is_valid = best_of_row(best_ptr, row, NUM_CHUNKS, CHUNKS)
    if is_valid & has_cut(row, size, inverse_ptr, top_k_ptr, top_p_ptr):
        low, high = tl.full((), LOWEST_KEY, tl.int64), key_of(best).to(tl.int64) + 1
        if (top_k > 0) & (top_k < size):
            blocks = NUM_CHUNKS * (CHUNK // BLOCK)
            maxima, wanted = maxima_ptr + row * blocks, top_k.to(tl.float64)
            low, _ = _search(maxima, blocks, wanted, low, high, best, inverse, True, _TILE, _THRESHOLDS)
        else:  # Tokens below the bound add up to less than 1 - top_p.
            total = _sum_of_row(sums_ptr, row, NUM_CHUNKS, CHUNKS)
            bound = best.to(tl.float64) + tl.log(0.999 * (1.0 - top_p) * total / size) / inverse
            bound = tl.maximum(bound, -3.4028234663852886e38).to(tl.float32)
            low = tl.minimum(key_of(bound).to(tl.int64) - 1, high - 1)
        tl.store(bounds_ptr + row, low.to(tl.int32))


@triton.jit
def collect(
    logits_ptr,
    stride,
    size,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    bounds_ptr,
    candidates_ptr,  # [rows, chunks, ROOM]: logits from the bound on, in their order, then -inf
    counts_ptr,  # [rows, chunks]: their number, which may exceed ROOM
    ROOM: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Collect the logits from the bound on, with one program per chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, is_valid = best_of_row(best_ptr, row, NUM_CHUNKS, CHUNKS)
    if is_valid & has_cut(row, size, inverse_ptr, top_k_ptr, top_p_ptr):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * stride + token, mask=token < size, other=float("-inf"))
        is_in = (key_of(x) >= tl.load(bounds_ptr + row)) & (token < size)
        rank = tl.cumsum(is_in.to(tl.int32), axis=0) - 1
        count = tl.sum(is_in.to(tl.int32), axis=0)
        candidates = candidates_ptr + (row * NUM_CHUNKS + chunk) * ROOM
        tl.store(candidates + rank, x, mask=is_in & (rank < ROOM))
        slot = tl.arange(0, ROOM)
        tl.store(candidates + slot, tl.full((ROOM,), float("-inf"), tl.float32), mask=slot >= count)
        tl.store(counts_ptr + row * NUM_CHUNKS + chunk, count)


@triton.jit
def find_cuts(
    logits_ptr,
    stride,
    size,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    sums_ptr,
    bounds_ptr,
    candidates_ptr,
    counts_ptr,
    cuts_ptr,  # [rows, 2]: a key, and how many of the tokens that equal it stay
    ROOM: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(inverse_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    best, is_valid = best_of_row(best_ptr, row, NUM_CHUNKS, CHUNKS)
    if is_valid & has_cut(row, size, inverse_ptr, top_k_ptr, top_p_ptr):
        chunk = tl.arange(0, CHUNKS)
        counts = tl.load(counts_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=0)
        has_all = tl.max(counts, axis=0) <= ROOM
        logits = tl.where(has_all, candidates_ptr + row * NUM_CHUNKS * ROOM, logits_ptr + row * stride)
        number = tl.where(has_all, NUM_CHUNKS * ROOM, size)
        low, high = tl.load(bounds_ptr + row).to(tl.int64), key_of(best).to(tl.int64) + 1
        total, ties = _sum_of_row(sums_ptr, row, NUM_CHUNKS, CHUNKS), tl.zeros((), tl.int64) + size
        if (top_k > 0) & (top_k < size):
            wanted = top_k.to(tl.float64)
            low, above = _search(logits, number, wanted, low, high, best, inverse, True, _TILE, _THRESHOLDS)
            ties = top_k - above.to(tl.int64)
            if top_p < 1.0:
                above_it = low + tl.arange(1, 2)
                kept = _amounts(logits, number, low + 1, high, above_it, best, inverse, False, _TILE, 1)
                total = tl.sum(kept, axis=0)
                total += weight_of(value_of(low.to(tl.int32)), best, inverse) * ties.to(tl.float64)
        if top_p < 1.0:
            wanted = top_p * total
            key, above = _search(logits, number, wanted, low, high, best, inverse, False, _TILE, _THRESHOLDS)
            each = tl.maximum(weight_of(value_of(key.to(tl.int32)), best, inverse), 1e-300)
            taken = tl.minimum(tl.maximum(tl.ceil((wanted - above) / each), 1.0), 1e9).to(tl.int64)
            ties = tl.where(key == low, tl.minimum(ties, taken), taken)
            low = key
        tl.store(cuts_ptr + 2 * row, low.to(tl.int32))
        tl.store(cuts_ptr + 2 * row + 1, ties.to(tl.int32))
