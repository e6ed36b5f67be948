"""Measure the native matrix products beside torch's own and oneDNN's with prepacked weights.

    python -m benchmarks.native_gemm [--threads N] [--json benchmarks/results/native_gemm.json]

Each figure is the best of many calls, in which the contestants take turns; the weights exceed the CPU's caches.
With one thread the clock is that thread's own, so that other work on the machine takes bandwidth from it, but no
time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine.kernels import native

SHAPES = {
    "Qwen3-0.6B qkv": (4096, 1024),
    "Qwen3-0.6B output": (1024, 2048),
    "Qwen3-0.6B gate, up": (6144, 1024),
    "Qwen3-0.6B down": (1024, 3072),
    "Gemma 3 0.5B qkv": (1536, 1024),
    "Llama 15M qkv": (768, 256),
    "Llama 15M down": (256, 768),
}
"""Outputs and inputs."""
ROWS = (1, 2, 4, 8, 16, 32, 128, 256, 512)
_CACHES = 200_000_000
"""Bytes of weights that take turns, so that each is read from memory; fewer for small matrices."""
_MOST_COPIES = 64
_TO_FLOATS = 0

Call = Callable[[], object]


def native_call(
    weights: list[torch.Tensor], rows: torch.Tensor, isa: str | None, is_int8: bool, threads: int
) -> Call:
    """Return a call of the native product with the next of the weights."""
    kernels = native.kernels(rows.dtype, isa)
    outputs, inputs = weights[0].shape
    scales = torch.empty(outputs)
    packed = [torch.empty(outputs * inputs, dtype=torch.int8 if is_int8 else rows.dtype) for _ in weights]
    for weight, to in zip(weights, packed, strict=True):
        arguments = weight.data_ptr(), outputs, inputs, False, to.data_ptr()
        if is_int8:
            kernels.pack_int8(*arguments, scales.data_ptr())
        else:
            kernels.pack(*arguments)
    scale = scales.data_ptr() if is_int8 else None
    linears = cycle([native.NativeLinear(one.data_ptr(), scale, None, outputs, inputs) for one in packed])
    padded = torch.zeros(-(-len(rows) // 16) * 16, inputs, dtype=rows.dtype)
    padded[: len(rows)] = rows
    out = torch.empty(len(rows), outputs)
    kept = packed, scales

    def call() -> object:
        linear = ctypes.byref(next(linears))
        kernels.linear(linear, padded.data_ptr(), inputs, len(rows), _TO_FLOATS, out.data_ptr(), outputs, threads)
        return kept

    return call


def contestants(
    dtype: torch.dtype, shape: tuple[int, int], num_rows: int, threads: int
) -> Iterator[tuple[str, Call]]:
    """Return the name and call of each contestant."""
    copies = max(1, min(_MOST_COPIES, _CACHES // (shape[0] * shape[1] * dtype.itemsize)))
    weights = [torch.randn(shape).to(dtype) for _ in range(copies)]
    rows = torch.randn(num_rows, shape[1]).to(dtype)
    yield "native", native_call(weights, rows, None, False, threads)
    yield "native int8", native_call(weights, rows, None, True, threads)
    plain = cycle(weights)
    yield "F.linear", lambda: torch.nn.functional.linear(rows, next(plain))
    try:
        prepacked: Any = cycle([torch.ops.mkldnn._reorder_linear_weight(weight, num_rows) for weight in weights])
    except (AttributeError, RuntimeError):  # private to torch, and on many processors only for bfloat16
        return
    yield (
        "oneDNN prepacked",
        lambda: torch.ops.mkldnn._linear_pointwise(rows, next(prepacked), None, "none", [], ""),
    )


def best_times(
    calls: dict[str, Call], clock: Callable[[], float], rounds: int, seconds: float
) -> dict[str, float]:
    """Return the seconds of each contestant's fastest call; each round takes `seconds`."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            end = clock() + seconds
            while (began := clock()) < end:
                call()
                best[name] = min(best[name], clock() - began)
    return best


def read_bandwidth(clock: Callable[[], float]) -> float:
    """Measure the GB/s at which torch sums 512 MB of floats."""
    numbers = torch.ones(128 << 20)
    return numbers.nbytes / best_times({"": numbers.sum}, clock, 3, 0.3)[""] / 1e9


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.05, help="for each contestant and round (%(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--note", default="", help="what else the machine was doing")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    console, results = Console(), []
    bandwidth = read_bandwidth(clock)
    console.print(f"{args.threads} threads read {bandwidth:.1f} GB/s")
    for dtype in (getattr(torch, name) for name in args.dtypes):
        table = Table(title=f"{dtype}, {native.kernels(dtype).isa}: µs, GB/s of weights, GF/s")
        for name, shape in SHAPES.items():
            for num_rows in ROWS:
                calls = dict(contestants(dtype, shape, num_rows, args.threads))
                times = best_times(calls, clock, args.rounds, args.seconds)
                row = {"dtype": str(dtype).removeprefix("torch."), "matrix": name, "rows": num_rows}
                results.append(row | {contestant: round(s * 1e6, 1) for contestant, s in times.items()})
                if not table.columns:
                    for column in ("matrix", "rows", *times):
                        table.add_column(column, justify="left" if column == "matrix" else "right")
                table.add_row(name, str(num_rows), *(_cell(s, dtype, shape, num_rows) for s in times.values()))
        console.print(table)
    if args.json is not None:
        figures = {"threads": args.threads, "read_gb_s": round(bandwidth, 1), "note": args.note, "us": results}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _cell(seconds: float, dtype: torch.dtype, shape: tuple[int, int], rows: int) -> str:
    elements = shape[0] * shape[1]
    size = elements * dtype.itemsize
    return f"{seconds * 1e6:.0f}  {size / seconds / 1e9:.1f}  {2 * rows * elements / seconds / 1e9:.0f}"


if __name__ == "__main__":
    main()
