"""Attention of a block of queries to a tile of KV, the part that decode and extend kernels share.

Softmax is computed online (Milakov and Gimelshein 2018, arXiv:1805.02867), in base 2 and float32. Rows of a block:

    queries that share a KV head    [ q0 h0 | q0 h1 | q1 h0 | q1 h1 | ... ]       "packed": group 2
"""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Without it, `launch` never sets PDL.
    gdc_launch_dependents = gdc_wait = None

TILE = tl.constexpr(64)
"""Positions of KV read together. Pages may be smaller or larger."""
LOWEST = tl.constexpr(-1e30)
"""Initial value of running maxima: finite, so that a row that has seen nothing yet subtracts no infinities."""
LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)


def is_interpreted(kernel: object) -> bool:
    """Whether Triton runs a kernel in its Python interpreter, as on machines without a GPU (TRITON_INTERPRET=1).

    The interpreter's `tl.dot` is wrong for bfloat16, so kernels convert to float32 first.
    """
    return not isinstance(kernel, triton.JITFunction)


@triton.jit
def start(PDL: tl.constexpr):
    """Wait for the previous kernel, and let the next one be launched meanwhile. A kernel with PDL (programmatic
    dependent launch) calls this first; otherwise it would read numbers that are not written yet.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _tanh(x):
    """By tanh |x| = (1 - e) / (1 + e) with e = exp(-2 |x|), or near 0, where 1 - e loses digits, by its series."""
    power = tl.exp2(tl.abs(x) * (-2.0 * _LOG2_E))
    far = (1.0 - power) / (1.0 + power)
    square = x * x
    near = x + x * square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315)))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def scores_of_sinks(sinks, heads, is_head):
    """Return the sinks of these heads as scores: times log2(e), float32."""
    return tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E


@triton.jit
def store_sums(places, highest, total, is_real):
    """Write the natural logarithms of sums of weights, which are relative to `highest`, in base 2; -inf for 0."""
    logarithms = (highest + tl.log2(tl.where(total > 0, total, 1.0))) / _LOG2_E
    tl.store(places, tl.where(total > 0, logarithms, float("-inf")), mask=is_real)


@triton.jit
def weighed(scores, highest, total):
    """Return the weights of a tile's scores, the factor of earlier sums, and the new `highest` and `total`
    (`attend`).
    """
    risen = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - risen[:, None])
    shrink = tl.exp2(highest - risen)
    return weights, shrink, risen, total * shrink + tl.sum(weights, 1)


@triton.jit
def seen_tiles(offset, first, last, WINDOW: tl.constexpr, SIZE: tl.constexpr):
    """Return the positions that queries `first` to `last` of a row see; its first query is at `offset`. The
    results are the first position that any of them sees; the first tile of SIZE positions that all of them see
    completely, and the one after the last such tile; and the end of the positions that any of them sees. WINDOW: 0
    if there is none.
    """
    start = 0
    whole_start = 0
    if WINDOW > 0:
        start = tl.maximum(offset + first - WINDOW + 1, 0)
        whole_start = tl.cdiv(tl.maximum(offset + last - WINDOW, 0), SIZE)
    end = offset + last
    whole_start = tl.minimum(whole_start, tl.cdiv(end, SIZE))
    whole_end = tl.minimum(offset + first + 1, end) // SIZE  # a tile may begin past the row's queries
    return start, whole_start, tl.maximum(whole_end, whole_start), end


@triton.jit
def load_queries(
    query,
    begins,
    is_row,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return the queries [M, BLOCK_D] that begin at these places [M], and their further numbers, [M, BLOCK_R] if
    REST; zeros for rows that are none.
    """
    dims = tl.arange(0, BLOCK_D)
    is_real = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    block = tl.load(query + begins[:, None] + dims[None, :], mask=is_real, other=0.0)
    rest = block
    if REST > 0:
        dims = HEAD_DIM + tl.arange(0, BLOCK_R)
        is_real = is_row[:, None] & (dims < HEAD_DIM + REST)[None, :]
        rest = tl.load(query + begins[:, None] + dims[None, :], mask=is_real, other=0.0)
    return block, rest


@triton.jit
def attend(
    acc,  # float32 [M, BLOCK_D]: sum of weighted values, relative to `highest`
    highest,  # float32 [M]: largest score so far
    total,  # float32 [M]: sum of weights, relative to it
    query,  # [M, BLOCK_D]
    rest,  # [M, BLOCK_R]: the queries' further numbers; ignored unless REST
    positions,  # int32 [TILE]
    exists,  # bool [TILE]: other positions are not read
    seen,  # bool [M, TILE] or [1, TILE]; ignored unless MASKED
    table,  # the row's page ids
    keys,  # the KV head's first element
    values,  # ignored if REST
    page_stride,
    token_stride,
    scale,  # factor of scores, times log2(e)
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,  # latent KV: numbers of a key after the HEAD_DIM that are its value; otherwise 0
    SOFT_CAP: tl.constexpr,  # 0: none
    MASKED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return `acc`, `highest` and `total` after one more tile."""
    dims = tl.arange(0, BLOCK_D)
    pages = tl.load(table + positions // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
    begins = pages * page_stride + (positions % PAGE_SIZE) * token_stride
    offsets = begins[:, None] + dims[None, :]
    held = exists[:, None] & (dims < HEAD_DIM)[None, :]
    dot_type: tl.constexpr = tl.float32 if INTERPRETED else query.dtype
    key = tl.load(keys + offsets, mask=held, other=0.0).to(query.dtype).to(dot_type)
    value = key
    if REST == 0:
        value = tl.load(values + offsets, mask=held, other=0.0).to(query.dtype).to(dot_type)
    scores = tl.dot(query.to(dot_type), tl.trans(key), input_precision="ieee")
    if REST > 0:
        rest_dims = tl.arange(0, rest.shape[1])
        held = exists[:, None] & (rest_dims < REST)[None, :]
        offsets = begins[:, None] + HEAD_DIM + rest_dims[None, :]
        key_rest = tl.load(keys + offsets, mask=held, other=0.0).to(query.dtype).to(dot_type)
        scores = tl.dot(rest.to(dot_type), tl.trans(key_rest), scores, input_precision="ieee")
    scores = scores * scale
    if SOFT_CAP > 0:
        scores = _tanh(scores * (1.0 / (SOFT_CAP * _LOG2_E))) * (SOFT_CAP * _LOG2_E)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    weights, shrink, risen, total = weighed(scores, highest, total)
    acc = tl.dot(weights.to(dot_type), value, acc * shrink[:, None], input_precision="ieee")
    return acc, risen, total
