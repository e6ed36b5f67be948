"""Measure attention over paged KV on a CPU: the native kernels, `reference` and torch's own attention.

    python -m benchmarks.native_attention [--rounds 7] [--json benchmarks/results/native_attention.json]

Decode is measured in GB/s of keys and values read, and compared with the bandwidth of a plain sum; the layers of a
workload together exceed the CPU's caches. Extend is measured in GF/s of the causal half, and compared with a
matrix product of the same type. torch's attention gets contiguous keys and values, which no paged cache has. Of
latent KV (MLA), a decode is bound by products too, and is measured like an extend. The
arms take turns layer by layer, and each keeps its best call: other processes can only add time. One thread is
measured in processor time, to which they add less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from cache import Namespace
from engine.attention.base import AttentionBackend, AttentionShape, AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import KVPages, store_kv
from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention
from engine.kernels import native
from engine.values.plan import Chunk
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workload:
    """`rows` requests with `context` positions each, of which the last `new` are this step's."""

    name: str
    rows: int
    context: int
    new: int
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    layers: int = 1
    latent: int | None = None

    @property
    def value_dim(self) -> int:
        """Numbers of a value: of latent KV, the first of a key."""
        return self.latent or self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of bf16 KV that one layer's decode reads."""
        return self.rows * self.context * self.kv_heads * self.head_dim * 2 * 2

    @property
    def flops(self) -> int:
        """Operations of one layer: two products per head for each query and position that it sees."""
        seen = self.new * self.context - self.new * (self.new - 1) // 2
        return self.rows * seen * self.heads * (self.head_dim + self.value_dim) * 2


DECODES = (
    Workload("decode 8 x 1024", 8, 1024, 1, layers=16),
    Workload("decode 8 x 1024, page 1", 8, 1024, 1, page_size=1, layers=16),
    Workload("decode 8 x 1024, page 64", 8, 1024, 1, page_size=64, layers=16),
    Workload("decode 1 x 4096", 1, 4096, 1, layers=32),
    Workload("decode 64 x 512, group 4", 64, 512, 1, heads=32, layers=4),
    Workload("verify 8 x 1024, 4 tokens", 8, 1024, 4, layers=16),
    Workload("decode 32 x 200, small heads", 32, 200, 1, 4, 2, 64, layers=16),
    Workload("decode 1 x 100, small heads", 1, 100, 1, 4, 2, 64, layers=4),
)
EXTENDS = (
    Workload("extend 1024", 1, 1024, 1024),
    Workload("extend 4096", 1, 4096, 4096),
    Workload("extend 512 after 3584", 1, 4096, 512),
    Workload("extend 8 x 128", 8, 128, 128),
    Workload("extend 4 x 256, small heads", 4, 256, 256, 4, 2, 64),
)
LATENTS = (
    Workload("latent decode 8 x 1024, 16 heads", 8, 1024, 1, 16, 1, 576, layers=16, latent=512),
    Workload("latent decode 8 x 1024, 128 heads", 8, 1024, 1, 128, 1, 576, layers=4, latent=512),
    Workload("latent decode 1 x 4096, 128 heads", 1, 4096, 1, 128, 1, 576, layers=4, latent=512),
    Workload("latent extend 512, 16 heads", 1, 512, 512, 16, 1, 576, latent=512),
    Workload("latent extend 256 after 1792, 128 heads", 1, 2048, 256, 128, 1, 576, latent=512),
)
"""Of DeepSeek-V3, as one rank computes it and as eight do."""


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    wanted = [w for w in (*DECODES, *EXTENDS, *LATENTS) if options.only in w.name]
    result: dict[str, Any] = {"machine": _machine(options.note), "rounds": options.rounds}
    result["peaks"] = _peaks(options.rounds)
    result["workloads"] = [_measure(workload, options.rounds) for workload in wanted]
    _print(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def _best(arms: dict[str, Callable[[int], object]], rounds: int, layers: int = 1) -> dict[str, float]:
    """Return the seconds of each arm's best call for one layer."""
    best = dict.fromkeys(arms, float("inf"))
    for layer in (layer for _ in range(rounds + 1) for layer in range(layers)):
        for name, call in arms.items():
            started = _clock()
            call(layer)
            best[name] = min(best[name], _clock() - started)
    return best


def _clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _peaks(rounds: int) -> dict[str, float]:
    memory = torch.ones(64, 1 << 22)
    a, b = torch.randn(1024, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()
    best = _best(
        {"read": lambda part: memory[part].sum(), "product": lambda _: F.linear(a, b)}, rounds, len(memory)
    )
    return {
        "read_gbs": memory[0].numel() * 4 / best["read"] / 1e9,
        "bf16_product_gfs": 2 * 1024**3 / best["product"] / 1e9,
    }


def _measure(workload: Workload, rounds: int) -> dict[str, Any]:
    arms = {**paged_attention(workload), "torch": _torch(workload)}
    best = _best(arms, rounds, workload.layers)
    is_read = workload in DECODES
    rate, unit = (workload.kv_bytes, "gbs") if is_read else (workload.flops, "gfs")
    return {
        **asdict(workload),
        "us_a_layer": {name: seconds * 1e6 for name, seconds in best.items()},
        unit: {name: rate / seconds / 1e9 for name, seconds in best.items()},
    }


def paged_attention(workload: Workload, dtype: torch.dtype = torch.bfloat16) -> dict[str, Callable[[int], object]]:
    """Return each backend's attention of a layer over scattered pages."""
    w = workload
    per_row = -(-w.context // w.page_size)
    parts = 2 if w.latent is None else 1
    pages = KVPages(w.layers, per_row * w.rows, w.page_size, w.kv_heads, w.head_dim, dtype, CPU, parts)
    for layer in pages.data:
        layer.normal_()
    order = torch.randperm(per_row * w.rows, generator=torch.Generator().manual_seed(0)).tolist()
    request = Request.make("r", [0], SamplingParams(), arrival=0.0, seed=0, namespace=Namespace("m"))
    held = [order[row * per_row : (row + 1) * per_row] for row in range(w.rows)]
    chunks = [Chunk(request, w.context - w.new, w.new, [0] * w.new, own, samples=True) for own in held]
    batch = AttentionBatch.from_chunks(chunks, w.page_size, pages.null_page)
    shape = AttentionShape(w.heads, w.kv_heads, w.head_dim, w.page_size, frozenset({None}), latent=w.latent)
    query = torch.randn(w.rows * w.new, w.heads, w.head_dim).to(dtype)
    key, *value = torch.randn(parts, w.rows * w.new, w.kv_heads, w.head_dim).to(dtype)

    def layer_of(step: AttentionStep) -> Callable[[int], object]:
        def attend(layer: int) -> torch.Tensor:
            store_kv(pages.layer(layer), batch.slot_mapping, key, value[0] if value else None)
            return step.attend(pages.layer(layer), query, None)

        return attend

    backends: dict[str, AttentionBackend] = {
        "native": NativeAttention(shape),
        "reference": ReferenceAttention(shape),
    }
    return {name: layer_of(backend.prepare(batch, pages.null_page)) for name, backend in backends.items()}


def _torch(workload: Workload) -> Callable[[int], object]:
    """Return torch's attention over contiguous keys and values; heads that share them are further queries."""
    w = workload
    group, parts = w.heads // w.kv_heads, 2 if w.latent is None else 1
    kv = torch.randn(w.layers, parts, w.rows, w.kv_heads, w.context, w.head_dim, dtype=torch.bfloat16)
    if w.new == 1:
        query = torch.randn(w.rows, w.kv_heads, group, w.head_dim, dtype=torch.bfloat16)
        return lambda layer: F.scaled_dot_product_attention(query, kv[layer, 0], kv[layer, -1, ..., : w.value_dim])
    query = torch.randn(w.rows, w.heads, w.new, w.head_dim, dtype=torch.bfloat16)
    repeated = kv.repeat_interleave(group, 3)
    is_whole = w.new == w.context
    mask = None if is_whole else torch.ones(w.new, w.context, dtype=torch.bool).tril(w.context - w.new)
    return lambda layer: F.scaled_dot_product_attention(
        query, repeated[layer, 0], repeated[layer, -1, ..., : w.value_dim], attn_mask=mask, is_causal=is_whole
    )


def _machine(note: str) -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": native.kernels(torch.bfloat16).isa,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "note": note,
    }


def _print(result: dict[str, Any]) -> None:
    peaks = result["peaks"]
    title = f"{peaks['read_gbs']:.1f} GB/s read, {peaks['bf16_product_gfs']:.0f} GF/s in a bf16 product"
    table = Table(
        "workload", "unit", "native", "reference", "torch, contiguous", "native, us a layer", title=title
    )
    for measured in result["workloads"]:
        unit = "gfs" if "gfs" in measured else "gbs"
        rates = [f"{measured[unit][arm]:.1f}" for arm in ("native", "reference", "torch")]
        table.add_row(
            measured["name"],
            {"gfs": "GF/s", "gbs": "GB/s"}[unit],
            *rates,
            f"{measured['us_a_layer']['native']:.0f}",
        )
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="workloads with this in their name")
    parser.add_argument("--note", default="", help="note for the result: what else ran on the machine")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
