"""Finds the tokens that top-k and top-p keep of rows of logits, without a sort.

    bounds   a value: no token below it stays                            [R]
    narrow   rows with only top-p: a range with the cut, twice           [R, C, thresholds]
    collect  the tokens in the range                                     [R, C, few]
    cuts     among these, or in the whole row if there are too many      [R]

A cut is a place in the order of logits: all tokens above a value stay, and the first few that equal it. The search
reads the bits of floats as integers of the same order ("keys"): a pass over the tokens sums the amounts above each
of 16 thresholds, and narrows the range 17-fold. The bound of top-k leaves few tokens. That of top-p leaves most of
a vocabulary if tokens are about equally likely, and one program would search these for milliseconds, so all
chunks' programs narrow the range first. Rows without a cut are not touched.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-(2**31))
_TILE = tl.constexpr(1024)
"""Tokens examined together in the search."""
_TILE_OF_CHUNK = tl.constexpr(512)
"""The same for a program with only one chunk, which has fewer threads."""
_THRESHOLDS = tl.constexpr(16)
THRESHOLDS = 16
"""Thresholds for which each pass of `narrow` has partial sums."""
PASSES = 2
"""Number of passes of `narrow`: together they divide a row's range of values by 289."""
_LOWEST = tl.constexpr(-3.4028234663852886e38)


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
    """For each of MANY thresholds, sum up those of `size` logits that reach it and are in low .. high - 1.

    Returns float64: their number if COUNTS, else their weight.
    """
    amounts = tl.zeros((TILE, MANY), dtype=tl.float64)
    for start in range(0, size, TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(logits + token, mask=token < size, other=float("-inf"))
        keys = key_of(x)
        is_in = (keys >= low.to(tl.int32)) & (keys < high.to(tl.int32)) & (token < size)
        if tl.max(is_in.to(tl.int32), axis=0) > 0:  # later passes often find none
            each = is_in.to(tl.float64)
            if not COUNTS:
                each *= weight_of(x, best, inverse)
            amounts += tl.where(keys[:, None] >= thresholds.to(tl.int32)[None, :], each[:, None], 0.0)
    return tl.sum(amounts, axis=0)


@triton.jit
def _narrowed(low, high, above, wanted, thresholds, amounts):
    """Return the part of the range low .. high - 1 in which `wanted` is reached, and the sum from its end on.

    amounts: float64, the sums from each threshold on; above: the sum from `high` on, less than `wanted`.
    """
    is_reached = (amounts >= wanted) | (thresholds <= low)
    above = tl.maximum(above, tl.max(tl.where(is_reached, 0.0, amounts), axis=0))
    high = tl.minimum(high, tl.min(tl.where(is_reached, high, thresholds), axis=0))
    low = tl.maximum(low, tl.max(tl.where(is_reached, thresholds, low), axis=0))
    return low, high, above


@triton.jit
def _search(
    logits,
    size,
    wanted,
    low,
    high,
    above,
    best,
    inverse,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
    MANY: tl.constexpr,
):
    """Return the highest key from which on `size` logits sum up to `wanted`, and the sum of those above it.

    Searches from `low`, the result if there is no such key, to `high`, from which on they add up to `above`.
    """
    while high - low > 1:
        thresholds = low + ((high - low) * (tl.arange(0, MANY) + 1).to(tl.int64)) // (MANY + 1)
        amounts = above + _amounts(logits, size, low, high, thresholds, best, inverse, COUNTS, TILE, MANY)
        low, high, above = _narrowed(low, high, above, wanted, thresholds, amounts)
    return low, above


@triton.jit
def _is_narrowed(row, size, top_k_ptr):
    """Whether a row with a cut has only top-p."""
    top_k = tl.load(top_k_ptr + row)
    return (top_k <= 0) | (top_k >= size)


@triton.jit
def _even_thresholds(low, high, MANY: tl.constexpr):
    """Return keys whose values divide a range evenly."""
    share = (tl.arange(0, MANY) + 1).to(tl.float32) / (MANY + 1)
    lowest = tl.maximum(value_of(low.to(tl.int32)), _LOWEST)
    return key_of(lowest * (1 - share) + value_of((high - 1).to(tl.int32)) * share).to(tl.int64)


@triton.jit
def _range_of(
    row,
    passes,
    wanted,
    ranges_ptr,  # [rows, PASSES + 1, 2]: keys, the first and the one after the last
    aboves_ptr,  # [rows, PASSES + 1]: the weight from the end of the range on
    parts_ptr,  # [rows, PASSES, chunks, MANY]: the weight of a chunk's tokens in the range before, by threshold
    PASSES: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Return a row's range after so many passes, by the results of all chunks, and the weight from its end on."""
    at = row * (PASSES + 1) + tl.maximum(passes - 1, 0)
    low, high = tl.load(ranges_ptr + 2 * at).to(tl.int64), tl.load(ranges_ptr + 2 * at + 1).to(tl.int64)
    above = tl.load(aboves_ptr + at)
    if passes > 0:
        thresholds, chunk = _even_thresholds(low, high, MANY), tl.arange(0, CHUNKS)[:, None]
        parts = parts_ptr + ((row * PASSES + passes - 1) * NUM_CHUNKS + chunk) * MANY + tl.arange(0, MANY)[None, :]
        amounts = above + tl.sum(tl.load(parts, mask=chunk < NUM_CHUNKS, other=0.0), axis=0)
        low, high, above = _narrowed(low, high, above, wanted, thresholds, amounts)
    return low, high, above


@triton.jit
def _store_range(at, low, high, above, ranges_ptr, aboves_ptr):
    tl.store(ranges_ptr + 2 * at, low.to(tl.int32))
    tl.store(ranges_ptr + 2 * at + 1, high.to(tl.int32))
    tl.store(aboves_ptr + at, above)


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
    ranges_ptr,  # begins with a key that is not above the cut of top-k, or of top-p if there is no top-k
    aboves_ptr,
    BLOCK: tl.constexpr,
    PASSES: tl.constexpr,
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
        none = tl.zeros((), tl.float64)
        if (top_k > 0) & (top_k < size):
            blocks = NUM_CHUNKS * (CHUNK // BLOCK)
            maxima, wanted = maxima_ptr + row * blocks, top_k.to(tl.float64)
            low, _ = _search(maxima, blocks, wanted, low, high, none, best, inverse, True, _TILE, _THRESHOLDS)
        else:  # Tokens below the bound add up to less than 1 - top_p.
            total = _sum_of_row(sums_ptr, row, NUM_CHUNKS, CHUNKS)
            bound = best.to(tl.float64) + tl.log(0.999 * (1.0 - top_p) * total / size) / inverse
            bound = tl.maximum(bound, _LOWEST).to(tl.float32)
            low = tl.minimum(key_of(bound).to(tl.int64) - 1, high - 1)
        _store_range(row * (PASSES + 1), low, high, none, ranges_ptr, aboves_ptr)


@triton.jit
def narrow(
    logits_ptr,
    stride,
    size,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    sums_ptr,
    ranges_ptr,
    aboves_ptr,
    parts_ptr,
    PASS: tl.constexpr,  # number of earlier passes
    PASSES: tl.constexpr,
    MANY: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sum the weights above each threshold, one program per chunk. All earlier sums determine the range."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, is_valid = best_of_row(best_ptr, row, NUM_CHUNKS, CHUNKS)
    is_cut = has_cut(row, size, inverse_ptr, top_k_ptr, top_p_ptr)
    if is_valid & is_cut & _is_narrowed(row, size, top_k_ptr):
        wanted = tl.load(top_p_ptr + row) * _sum_of_row(sums_ptr, row, NUM_CHUNKS, CHUNKS)
        found = ranges_ptr, aboves_ptr, parts_ptr
        low, high, above = _range_of(row, PASS, wanted, *found, PASSES, NUM_CHUNKS, CHUNKS, MANY)
        if (PASS > 0) & (chunk == 0):
            _store_range(row * (PASSES + 1) + PASS, low, high, above, ranges_ptr, aboves_ptr)
        thresholds, inverse = _even_thresholds(low, high, MANY), tl.load(inverse_ptr + row)
        logits, number = logits_ptr + row * stride + chunk * CHUNK, tl.minimum(size - chunk * CHUNK, CHUNK)
        amounts = _amounts(logits, number, low, high, thresholds, best, inverse, False, _TILE_OF_CHUNK, MANY)
        part = (row * PASSES + PASS) * NUM_CHUNKS + chunk
        tl.store(parts_ptr + part * MANY + tl.arange(0, MANY), amounts)


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
    sums_ptr,
    ranges_ptr,
    aboves_ptr,
    parts_ptr,
    candidates_ptr,  # [rows, chunks, ROOM]: logits in the range, in order, then -inf
    counts_ptr,  # [rows, chunks]: their number, which may exceed ROOM
    ROOM: tl.constexpr,
    PASSES: tl.constexpr,
    MANY: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Collect the logits in the last range, with one program per chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, is_valid = best_of_row(best_ptr, row, NUM_CHUNKS, CHUNKS)
    if is_valid & has_cut(row, size, inverse_ptr, top_k_ptr, top_p_ptr):
        wanted = tl.load(top_p_ptr + row) * _sum_of_row(sums_ptr, row, NUM_CHUNKS, CHUNKS)
        passes = tl.where(_is_narrowed(row, size, top_k_ptr), PASSES, 0)
        found = ranges_ptr, aboves_ptr, parts_ptr
        low, high, above = _range_of(row, passes, wanted, *found, PASSES, NUM_CHUNKS, CHUNKS, MANY)
        if chunk == 0:
            _store_range(row * (PASSES + 1) + PASSES, low, high, above, ranges_ptr, aboves_ptr)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * stride + token, mask=token < size, other=float("-inf"))
        keys = key_of(x).to(tl.int64)
        is_in = (keys >= low) & (keys < high) & (token < size)
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
    ranges_ptr,
    aboves_ptr,
    candidates_ptr,
    counts_ptr,
    cuts_ptr,  # [rows, 2]: a key, and how many of the tokens that equal it stay
    ROOM: tl.constexpr,
    PASSES: tl.constexpr,
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
        at = row * (PASSES + 1) + PASSES
        low, high = tl.load(ranges_ptr + 2 * at).to(tl.int64), tl.load(ranges_ptr + 2 * at + 1).to(tl.int64)
        above = tl.load(aboves_ptr + at)
        total, ties = _sum_of_row(sums_ptr, row, NUM_CHUNKS, CHUNKS), tl.zeros((), tl.int64) + size
        if (top_k > 0) & (top_k < size):
            wanted = top_k.to(tl.float64)
            low, more = _search(logits, number, wanted, low, high, above, best, inverse, True, _TILE, _THRESHOLDS)
            ties = top_k - more.to(tl.int64)
            if top_p < 1.0:
                above_it = low + tl.arange(1, 2)
                kept = _amounts(logits, number, low + 1, high, above_it, best, inverse, False, _TILE, 1)
                total = tl.sum(kept, axis=0)
                total += weight_of(value_of(low.to(tl.int32)), best, inverse) * ties.to(tl.float64)
        if top_p < 1.0:
            wanted = top_p * total
            key, more = _search(logits, number, wanted, low, high, above, best, inverse, False, _TILE, _THRESHOLDS)
            each = tl.maximum(weight_of(value_of(key.to(tl.int32)), best, inverse), 1e-300)
            taken = tl.minimum(tl.maximum(tl.ceil((wanted - more) / each), 1.0), 1e9).to(tl.int64)
            ties = tl.where(key == low, tl.minimum(ties, taken), taken)
            low = key
        tl.store(cuts_ptr + 2 * row, low.to(tl.int32))
        tl.store(cuts_ptr + 2 * row + 1, ties.to(tl.int32))
