"""Compiles all kernels for GPUs that are not there, as they are launched for models: see test_compiled.py.

Prints one JSON object: the kernels that are launched from Python, and a report of each launch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from triton.runtime.jit import JITFunction

from engine.attention.triton import TritonAttention
from engine.kernels import triton as kernels
from engine.kernels.delta_pieces import Advance, StatePieces
from engine.kernels.triton.delta_net import advance_decodes, convolve_decodes, gated, strengths
from engine.kernels.triton.delta_prompts import advance_rows, convolve
from engine.kernels.triton.extend import query_tiles
from engine.kernels.triton.extend_tma import TMA_ROWS, extend_tma
from engine.kernels.triton.few_rows import fp8_few_rows, plain_few_rows
from engine.kernels.triton.fp8 import round_rows
from engine.kernels.triton.fp8_gemm import fp8_block_linear
from engine.kernels.triton.grouped_gemm import experts_mlp
from engine.kernels.triton.int4_gemm import int4_linear
from engine.kernels.triton.merge import merge
from engine.kernels.triton.norm import add_norm, add_norm_fp8
from engine.kernels.triton.rope import rotate_into, rotations
from engine.kernels.triton.route import route
from engine.kernels.triton.rows import RowInputs, RowWords, enter, leave
from engine.kernels.triton.sample import SamplingTensors, choose, edit, penalize
from engine.kernels.triton.shared_prefixes import RowGroups
from engine.kernels.triton.silu import gated_fp8, silu_mul
from engine.kernels.triton.sum_ranks import sum_add_norm
from engine.layers.linear import Fp8BlockLinear, Fp8Linear, Int4Linear, QuantizedLinear
from engine.layers.matrix_stack import MatrixStack
from engine.layers.mxfp4_linear import Mxfp4Linear
from engine.model_parts.experts_config import Clamp
from tests.engine.support.compiled_kernels import compiled, name_of
from tests.engine.support.paged_kv import Heads, Paged

HALF, BRAIN, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
DECODES, EXTEND = [(3, 1)] * 40, [(0, 130)]
"""Rows of one token, and one that fills a program, of any group."""


def attention(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    heads: Heads,
    page_size: int,
    window: int | None = None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
    finds_groups: bool = False,
    rows: Sequence[tuple[int, int]] = (*DECODES, *EXTEND),
) -> None:
    """Launch the kernels of the work list, of decodes and their merging, and of extends.

    Those that find groups of rows see neither KV nor queries, so that once is enough.
    """
    case = Paged(rows, heads, page_size, window, dtype, soft_cap=soft_cap, has_sinks=has_sinks)
    with nullcontext() if finds_groups else patch.object(RowGroups, "find"):
        step = TritonAttention(case.shape).prepare(case.batch, case.pages.null_page)
        step.attend(case.pages.layer(0).to(kv_dtype), case.query(), window, sinks=case.sinks)


def parts_of_kv(heads: Heads) -> None:
    """Launch attention to a part of the positions, of decodes and of a prompt that comes after all of them."""
    case = Paged((*DECODES, *EXTEND), heads, 16, None, BRAIN, needs_sums=True, is_causal=False)
    with patch.object(RowGroups, "find"):
        case.attend_with_sums(TritonAttention(case.shape))


def prompts_by_tma(kv_dtype: torch.dtype, heads: Heads, tile: tuple[int, int], window: int | None = None) -> None:
    case = Paged([(0, 130)], heads, tile[0], window, BRAIN)
    batch, query = case.batch, case.query()
    tiles = torch.from_numpy(query_tiles(batch.query_lens, batch.kv_lens_host, 0, TMA_ROWS // heads.group))
    rows = batch.block_table, batch.qo_indptr, batch.kv_lens, tiles, query.flatten(1)
    pages = case.pages.layer(0).to(kv_dtype)
    extend_tma(query, pages, *rows, tile=tile, scale=1.0, window=window, kv_scales=(1.0, 1.0))


def experts(num_tokens: int, clamp: Clamp | None = None, *, is_gelu: bool = False) -> None:
    """Launch the expert kernels with as many experts as Qwen3-30B-A3B has, but small; with biases if clamped."""
    hidden, inner, num_experts, per_token = 256, 128, 128, 8
    gate_up, down = torch.zeros(num_experts, 2 * inner, hidden), torch.zeros(num_experts, hidden, inner)
    chosen, x = torch.zeros(num_tokens, per_token, dtype=torch.int64), torch.zeros(num_tokens, hidden)
    given = x.to(BRAIN), chosen, torch.zeros(num_tokens, per_token), gate_up.to(BRAIN), down.to(BRAIN), 0
    biases = None if clamp is None else (gate_up[..., 0].to(BRAIN), down[..., 0].to(BRAIN))
    experts_mlp(*given, biases, clamp, is_gelu=is_gelu)


def quantized_experts(kind: Callable[[nn.Linear], QuantizedLinear], num_tokens: int, dtype: torch.dtype) -> None:
    """Launch the expert kernels as for Qwen3-30B-A3B's experts, but with fewer of them."""
    hidden, inner, num_experts, per_token = 2048, 768, 8, 2
    stacks = []
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        with torch.device("meta"):
            layers = [kind(nn.Linear(inputs, outputs, bias=False)) for _ in range(num_experts)]
        stacks.append(MatrixStack(layers, dtype, torch.device("cpu")))
    chosen, x = torch.zeros(num_tokens, per_token, dtype=torch.int64), torch.zeros(num_tokens, hidden, dtype=dtype)
    experts_mlp(x, chosen, torch.zeros(num_tokens, per_token), stacks[0], stacks[1], 0)


INT4 = partial(Int4Linear, group_size=128)


def gpt_oss_experts(num_tokens: int, dtype: torch.dtype, inner: int = 2880) -> None:
    """Launch the expert kernels as for gpt-oss' experts, or a rank's columns of them, but with fewer of them."""
    hidden, num_experts, per_token = 2880, 8, 4
    stacks = []
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        with torch.device("meta"):
            layers = [Mxfp4Linear(nn.Linear(inputs, outputs, bias=False)) for _ in range(num_experts)]
        stacks.append(MatrixStack(layers, dtype, torch.device("cpu")))
    chosen, x = torch.zeros(num_tokens, per_token, dtype=torch.int64), torch.zeros(num_tokens, hidden, dtype=dtype)
    biases = torch.zeros(num_experts, 2 * inner, dtype=dtype), torch.zeros(num_experts, hidden, dtype=dtype)
    given = x, chosen, torch.zeros(num_tokens, per_token), stacks[0], stacks[1], 0
    experts_mlp(*given, biases, Clamp(1.702, 7.0))


def int4(num_rows: int, dtype: torch.dtype) -> None:
    inputs, outputs, group = 512, 128, 128
    packed = torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
    scales = torch.zeros(inputs // group, outputs)
    int4_linear(torch.zeros(num_rows, inputs, dtype=dtype), packed, scales, scales.byte(), group)


def operations(dtype: torch.dtype, kv_dtype: torch.dtype, hidden: int, heads: Heads) -> None:
    """Launch fused operations with and without a norm of queries and keys, in pages of one or more positions."""
    x = torch.zeros(3, hidden, dtype=dtype)
    add_norm(x, None, x[0], 1e-6)
    add_norm(x, x.clone(), x[0], 1e-6)
    silu_mul(torch.zeros(3, 4 * hidden, dtype=dtype))
    at = torch.zeros(3, dtype=torch.int64)
    angles = rotations(at, torch.zeros(1, heads.dim // 2), torch.ones(1, heads.dim // 2), dtype)[0]
    for page_size, norm in ((1, None), (16, torch.zeros(heads.num + heads.num_kv_heads, heads.dim, dtype=dtype))):
        fused = torch.zeros(3, heads.num + 2 * heads.num_kv_heads, heads.dim, dtype=dtype)
        layer = torch.zeros(2, 2, page_size, heads.num_kv_heads, heads.dim).to(kv_dtype)
        rotate_into(layer, at, fused, angles, norm, 1e-6)


def few_rows(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    plain_few_rows(torch.zeros(1, inputs, dtype=dtype), torch.zeros(outputs, inputs, dtype=dtype), None)


def few_rows_fp8(outputs: int, inputs: int) -> None:
    x, weight = torch.zeros(1, inputs).to(FP8), torch.zeros(outputs, inputs).to(FP8)
    fp8_few_rows(x, torch.zeros(1), weight, torch.zeros(outputs), None, BRAIN)


def blocks(num_rows: int, outputs: int, inputs: int) -> None:
    """Launch the product of float8 numbers in blocks, and the rounding of what it multiplies."""
    x, scale = round_rows(torch.zeros(num_rows, inputs, dtype=BRAIN), 128)
    weight = torch.zeros(outputs, inputs).to(FP8)
    fp8_block_linear(x, scale, weight, torch.zeros(outputs // 32, inputs // 128), BRAIN)


def merging(dtype: torch.dtype) -> None:
    part, sums = torch.zeros(32, 20, 128, dtype=dtype), torch.zeros(32, 20)
    merge(part, sums, part, sums, torch.zeros(20, 32 * 128, dtype=dtype))


def rounding(dtype: torch.dtype, hidden: int, inner: int) -> None:
    x = torch.zeros(3, hidden, dtype=dtype)
    add_norm_fp8(x, x.clone(), x[0], 1e-6)
    round_rows(x)
    gated_fp8(torch.zeros(3, 2 * inner, dtype=dtype), is_gelu=False)


def sum_of_ranks(num_ranks: int, hidden: int, *rounds: int) -> None:
    """Launch the sum with a plain norm, and with one rounded by each of these numbers of inputs."""
    x, addresses = torch.zeros(3, hidden, dtype=BRAIN), torch.zeros(num_ranks, dtype=torch.int64)
    calls = torch.zeros(64, dtype=torch.int64)
    for inputs in (0, *rounds):
        sum_add_norm(x, x.clone(), x[0], 1e-6, addresses, calls, 1, num_ranks, 2**19, inputs)


def sampling(vocab_size: int) -> None:
    asked, numbers = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64)
    choices = SamplingTensors(asked, numbers, asked.int(), numbers, numbers, draws=True, cuts=True)
    logits = torch.zeros(2, vocab_size)
    choose(logits, choices, asked)
    penalize(logits, logits.int(), torch.zeros(2, 7, dtype=torch.int64))
    edit(logits, asked.int(), asked.int(), torch.zeros(2))


def rows() -> None:
    numbers, long = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    words = RowWords(numbers, numbers, numbers, numbers, torch.zeros(1, 3, 20, dtype=torch.int32))
    enter(words, RowInputs(long, long, numbers, long, long), 3, 16)
    leave(words, long, long, 3)


def routing() -> None:
    route(torch.zeros(3, 128, dtype=BRAIN), 8, True)


def delta_net(dtype: torch.dtype) -> None:
    """A decode of a Qwen3-Next layer, but for fewer heads."""
    at, gates = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=dtype)
    mixed, z = torch.zeros(2, 768, dtype=dtype).tensor_split((512,), dim=1)
    inputs, conv = torch.zeros(3, 3, 512, dtype=dtype), torch.zeros(512, 4, dtype=dtype)
    convolved = convolve_decodes(mixed, conv, inputs, at, at)
    found = advance_decodes(
        torch.zeros(3, 2, 128, 128), at, at, convolved, *strengths(gates, gates[0, :2], gates[1, :2])
    )
    gated(found, z, inputs[0, 0, :128], 1e-6)


def delta_prompts() -> None:
    """A prompt of a Qwen3-Next layer, but for fewer heads."""
    pieces = StatePieces.of([Advance(0, 70, 2, [(70, 1)])])
    mixed, inputs = torch.zeros(70, 512, dtype=BRAIN), torch.zeros(3, 3, 512, dtype=BRAIN)
    convolved, _ = convolve(mixed, torch.zeros(512, 4, dtype=BRAIN), inputs, pieces)
    advance_rows(torch.zeros(3, 2, 128, 128), convolved, torch.zeros(70, 2), torch.zeros(70, 2), pieces)


_LATENT = Heads(16, 1, 576, 512)
"""DeepSeek-V2-Lite's heads, or those of a rank of eight of DeepSeek-V3."""


CASES: dict[int, tuple[Callable[[], None], ...]] = {
    75: (
        partial(attention, HALF, HALF, Heads(4, 2, 64), 16, rows=EXTEND),
        partial(attention, HALF, HALF, Heads(4, 2, 16), 16, rows=DECODES),
    ),
    80: (
        partial(attention, BRAIN, BRAIN, Heads(7, 2, 96), 3, 100),
        partial(int4, 16, BRAIN),
        partial(int4, 64, HALF),
        partial(few_rows, BRAIN, 4096, 14_336),
        partial(sum_of_ranks, 2, 4096),
        partial(delta_net, BRAIN),
        partial(experts, 16),
        *(partial(quantized_experts, INT4, num_tokens, HALF) for num_tokens in (16, 1024)),
        partial(quantized_experts, Fp8BlockLinear, 1024, BRAIN),
        partial(quantized_experts, Fp8Linear, 16, BRAIN),
        *(partial(gpt_oss_experts, num_tokens, BRAIN) for num_tokens in (8, 1024)),
        partial(gpt_oss_experts, 8, HALF),
    ),
    86: (partial(experts, 2048), delta_prompts),
    89: (
        partial(attention, BRAIN, FP8, Heads(8, 2, 128), 64),
        partial(delta_net, BRAIN),
        partial(attention, BRAIN, FP8, _LATENT, 64, rows=DECODES),
        partial(quantized_experts, Fp8BlockLinear, 16, BRAIN),
    ),
    90: (
        partial(attention, BRAIN, BRAIN, Heads(4, 2, 128), 16, finds_groups=True),
        partial(attention, BRAIN, FP8, Heads(4, 2, 128), 16, rows=DECODES),
        partial(attention, BRAIN, BRAIN, Heads(2, 2, 256), 1, soft_cap=50.0, has_sinks=True),
        partial(parts_of_kv, Heads(8, 1, 128)),
        partial(attention, BRAIN, BRAIN, _LATENT, 64),
        partial(attention, BRAIN, BRAIN, replace(_LATENT, group=128), 64, rows=DECODES),
        partial(prompts_by_tma, BRAIN, Heads(4, 2, 128), (128, 2)),
        partial(prompts_by_tma, FP8, Heads(4, 2, 128), (64, 3), 100),
        partial(attention, BRAIN, BRAIN, Heads(8, 2, 64), 16, 128, has_sinks=True, rows=DECODES),
        partial(experts, 16, is_gelu=True),
        partial(experts, 512, Clamp(1.702, 7.0)),
        partial(experts, 2048),
        *(partial(quantized_experts, kind, 16, BRAIN) for kind in (Fp8BlockLinear, Fp8Linear, INT4)),
        partial(quantized_experts, Fp8BlockLinear, 128, BRAIN),
        *(partial(quantized_experts, kind, 1024, BRAIN) for kind in (Fp8BlockLinear, INT4)),
        *(partial(gpt_oss_experts, num_tokens, BRAIN) for num_tokens in (8, 64, 1024)),
        partial(gpt_oss_experts, 8, BRAIN, 1440),
        partial(int4, 16, BRAIN),
        partial(int4, 64, BRAIN),
        partial(operations, BRAIN, BRAIN, 4096, Heads(4, 8, 128)),
        partial(operations, HALF, FP8, 896, Heads(7, 2, 96)),
        partial(rounding, BRAIN, 4096, 14_336),
        partial(few_rows, BRAIN, 4096, 14_336),
        partial(few_rows, HALF, 28_672, 4096),
        partial(few_rows_fp8, 4096, 4096),
        *(partial(blocks, num_rows, 4096, 4096) for num_rows in (8, 64, 128)),
        partial(sum_of_ranks, 8, 8192, 8192, 128),
        partial(sampling, 151_936),
        partial(sampling, 1),
        rows,
        routing,
        partial(delta_net, BRAIN),
        partial(delta_net, torch.float32),
        delta_prompts,
        partial(merging, BRAIN),
    ),
    100: (
        partial(prompts_by_tma, BRAIN, Heads(4, 2, 128), (128, 2)),
        partial(attention, BRAIN, BRAIN, Heads(4, 2, 128), 16),
        partial(attention, BRAIN, BRAIN, _LATENT, 64, rows=DECODES),
        partial(rounding, BRAIN, 8192, 28_672),
        partial(delta_net, BRAIN),
        partial(few_rows_fp8, 4096, 4096),
        *(partial(blocks, num_rows, 4096, 4096) for num_rows in (64, 128)),
        partial(int4, 8, BRAIN),
        partial(experts, 2048),
        *(partial(quantized_experts, Fp8BlockLinear, num_tokens, BRAIN) for num_tokens in (16, 1024)),
        partial(quantized_experts, INT4, 16, BRAIN),
        *(partial(gpt_oss_experts, num_tokens, BRAIN) for num_tokens in (8, 1024)),
    ),
}
"""By compute capability. With these numbers of tokens experts take tiles of each shape.

What differs between GPUs is compiled for each: products, what lies in shared memory, and copies by TMA. The rest
is compiled for one, and for another where it rounds to float8. Of attention without tensor cores what fills shared
memory is compiled in its size, and the rest, which takes long, with small heads.
"""


def entry_points() -> list[str]:
    """Kernels that no other one calls."""
    modules = [import_module(f"{kernels.__name__}.{module.name}") for module in iter_modules(kernels.__path__)]
    jitted = {value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}
    called = {name for kernel in jitted for name in kernel.fn.__code__.co_names}
    return sorted(name_of(kernel) for kernel in jitted if kernel.__name__ not in called)


def main() -> None:
    reports: list[dict[str, Any]] = []
    known: set[tuple[str, bool]] = set()
    for capability, cases in CASES.items():
        with compiled(capability, known) as launches:
            for case in cases:
                case()
        reports += launches
    print(json.dumps({"entry_points": entry_points(), "launches": reports}))


if __name__ == "__main__":
    main()
