"""Measure the layers that the native decoder does not compute on a CPU: what kernels of their own take, and torch.

    python -m benchmarks.native_layers [--rounds 7] [--json benchmarks/results/native_layers.json]

A gated delta net of Qwen3-Next's shape (from what its first projection gives to what its last one reads), and
attention over paged latent KV (MLA) of DeepSeek-V3's shape with 16 heads, as a rank of eight has them. Decodes are
of requests in several slots or pages. The two arms take turns in one process and each figure is the median of its
calls: with one thread of processor time, to which other processes add little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from benchmarks.native_attention import Workload, paged_attention
from benchmarks.this_machine import described
from engine.attention.state_batch import StateBatch, StateRow
from engine.attention.state_slots import LayerState
from engine.kernels import native
from engine.model_parts.parts import DeltaNetConfig
from engine.models.native_delta_net import DeltaInputs, NativeDeltaHeads
from engine.models.torch_delta_net import TorchDeltaHeads

DELTA_NET = DeltaNetConfig(16, 32, 128, 128, 4)
"""Of Qwen3-Next-80B-A3B."""
_EPS = 1e-6
LATENTS = (
    Workload("MLA decode 1 x 4096", 1, 4096, 1, 16, 1, 576, layers=8, latent=512),
    Workload("MLA decode 8 x 1024", 8, 1024, 1, 16, 1, 576, layers=4, latent=512),
    Workload("MLA prompt 1 x 512", 1, 512, 512, 16, 1, 576, latent=512),
    Workload("MLA prompt 4 x 128", 4, 128, 128, 16, 1, 576, latent=512),
)
Arms = Mapping[str, Callable[[], object]]


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"machine": _machine(options.note), "rounds": options.rounds}
    result["layers"] = [
        {"what": what, "dtype": dtype, "us": medians(arms, options.rounds)}
        for dtype in ("float32", "bfloat16")
        for what, arms in layers(getattr(torch, dtype))
        if options.only in what
    ]
    _print(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def layers(dtype: torch.dtype) -> Iterator[tuple[str, Arms]]:
    """Yield what is measured, and the calls of both arms."""
    for rows in (1, 8):
        yield f"delta net decode {rows} x 1", delta_net_step(dtype, rows)
    for rows, num_tokens in ((1, 512), (8, 64)):
        yield f"delta net prompt {rows} x {num_tokens}", delta_net_prompt(dtype, rows, num_tokens)
    for workload in LATENTS:
        found = paged_attention(workload, dtype)
        turns = {name: _through_layers(call, workload.layers) for name, call in found.items()}
        yield workload.name, {"native": turns["native"], "torch": turns["reference"]}


def delta_net_step(dtype: torch.dtype, rows: int) -> Arms:
    """Return the arms for so many requests that decode, in as many slots."""
    by_kernels, by_torch, state = _delta_nets(dtype, rows)
    inputs, slots = _inputs(rows, dtype), torch.arange(rows)
    return {
        "native": lambda: by_kernels.step(*inputs, state, slots, slots),
        "torch": lambda: by_torch.step(*inputs, state, slots, slots),
    }


def delta_net_prompt(dtype: torch.dtype, rows: int, num_tokens: int) -> Arms:
    """Return the arms for so many prompts, each from the beginning."""
    by_kernels, by_torch, state = _delta_nets(dtype, rows)
    firsts = enumerate(range(0, rows * num_tokens, num_tokens))
    prompts = [StateRow(first, first, num_tokens, rows, slot, 0, False, ()) for slot, first in firsts]
    inputs, batch = _inputs(rows * num_tokens, dtype), StateBatch.of(prompts, rows * num_tokens)
    return {
        "native": lambda: by_kernels.run(*inputs, state, batch),
        "torch": lambda: by_torch.run(*inputs, state, batch),
    }


def _delta_nets(dtype: torch.dtype, slots: int) -> tuple[NativeDeltaHeads, TorchDeltaHeads, LayerState]:
    """Return a layer's heads by the kernels, the same by torch, and their slots; the last one is never written.
    Raises native.NativeUnavailable.
    """
    shape = DELTA_NET
    conv = 0.2 * torch.randn(shape.channels, shape.kernel)
    weights = conv.to(dtype), 0.2 * torch.randn(shape.value_dim).to(dtype)
    by_kernels, by_torch = NativeDeltaHeads(shape, *weights, _EPS), TorchDeltaHeads(shape, *weights, _EPS)
    inputs = torch.zeros(slots + 1, shape.kernel - 1, shape.channels, dtype=dtype)
    matrices = torch.zeros(slots + 1, shape.num_value_heads, shape.key_dim, shape.value_dim)
    return by_kernels, by_torch, LayerState(inputs, matrices, torch.empty(0))


def _inputs(num_tokens: int, dtype: torch.dtype) -> tuple[DeltaInputs, torch.Tensor]:
    projected = torch.randn(num_tokens, DELTA_NET.channels + DELTA_NET.values).to(dtype)
    mixed, z = projected.tensor_split((DELTA_NET.channels,), dim=1)
    strength, decay = torch.randn(2, num_tokens, DELTA_NET.num_value_heads)
    return DeltaInputs(mixed, -F.softplus(decay), strength.sigmoid()), z


def _through_layers(call: Callable[[int], object], num_layers: int) -> Callable[[], object]:
    """Return calls of one layer after the other, as each step's find their KV in no cache."""
    turn = 0

    def next_layer() -> object:
        nonlocal turn
        turn += 1
        return call(turn % num_layers)

    return next_layer


def medians(arms: Arms, rounds: int) -> dict[str, float]:
    """Return the median microseconds of each arm's call, after one that does not count."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, call in arms.items():
            began = clock()
            call()
            if turn:
                taken[name].append(clock() - began)
    return {name: statistics.median(each) * 1e6 for name, each in taken.items()}


def _machine(note: str) -> dict[str, Any]:
    return {
        **described(),
        "threads": torch.get_num_threads(),
        "isa": native.kernels(torch.bfloat16).isa,
        "torch": torch.__version__,
        "note": note,
    }


def _print(result: dict[str, Any]) -> None:
    table = Table("layer", "type", "native, us", "torch, us", "ratio")
    for one in result["layers"]:
        by_kernels, by_torch = one["us"]["native"], one["us"]["torch"]
        table.add_row(
            one["what"],
            one["dtype"],
            f"{by_kernels:,.0f}",
            f"{by_torch:,.0f}",
            f"{by_torch / by_kernels:.1f}",
        )
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="layers with this in their name")
    parser.add_argument("--note", default="", help="note for the result: what else ran on the machine")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
