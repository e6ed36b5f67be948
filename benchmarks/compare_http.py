"""Compare servers over HTTP: Raydix, vLLM's own and Ray Serve LLM, and Raydix's engine without a server.

vLLM's and Ray's are there twice: as they ship, and in the modes that their authors recommend for speed
(`benchmarks/peers/servers.py`).

    benchmarks/peers/install.sh vllm rayllm          # once; what is not installed is left out
    python -m benchmarks.compare_http [--quick] [--rounds 5] [--json benchmarks/results/compare_http.json]
    python -m benchmarks.compare_http --device cuda --model qwen3-0.6b --precision bfloat16    # Raydix alone

All serve `compare.py`'s Llama of 15M parameters with the same precision and threads, in float32, which all compute
well on any CPU, if nothing else is asked for. They are asked the same by
`benchmarks/peers/http_load.py`: single streams one after the other, many prompts at once, many with a shared
prefix, cold and warm. "in process" is the same work through Raydix's `LLM`: what a server loses of that is its
overhead.

As it ships, Raydix's server ("direct") bounds by how much prompts make a step longer, so that other streams go on
evenly. `LLM` and the peers bound a step's tokens alone, and so does "unbounded", which is the one to compare with
them. Servers take turns; a figure is the median of the rounds, each with the range of its rates. The client shares
the processors with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from benchmarks.peers import http_load
from benchmarks.peers.models import CONFIGS, FIRST_WORD, make_model
from benchmarks.peers.process import RAYDIX, REPOSITORY, Peer, PeerFailed
from benchmarks.peers.protocol import Settings
from benchmarks.peers.servers import SERVERS, serving
from benchmarks.peers.workloads import FULL, QUICK, Sizes

MODEL = "llama-15m"
IN_PROCESS = "in process"
LATENCIES, RANKS = ("ttft", "itl"), ("p50", "p99")
FIGURES = ("_per_second", "_ms")
"""Ends of the names of figures in a row."""
Row = dict[str, Any]


def rows_of(name: str, settings: Settings, sizes: Sizes, ids: range, number: int, home: Path) -> Iterator[Row]:
    """Yield one round's figures of a server, or of the engine in process, a row for each workload.

    Prompts are drawn from `ids`, others in each round; `home` is where peers are installed.
    """
    if name == IN_PROCESS:
        yield from in_process(settings, sizes, ids, number, home)
        return
    with serving(name, settings, home) as server:
        found = asyncio.run(http_load.measure(server.url, sizes, ids, seed=100 * number))
    for workload, row in found.items():
        yield {
            "server": name,
            "workload": workload,
            "tokens_per_second": row["output_tokens_per_second"],
            **{
                f"{what}_{rank}_ms": row["latency"][what][rank] * 1e3
                for what, rank in product(LATENCIES, RANKS)
                if row["latency"][what]
            },
            "errors": row["errors"],
        }


def in_process(settings: Settings, sizes: Sizes, ids: range, number: int, home: Path) -> Iterator[Row]:
    """Yield the figures of Raydix's offline API, for the same jobs."""
    with tempfile.TemporaryDirectory() as directory:
        peer = Peer(RAYDIX, home, settings, Path(directory) / "log", timeout_s=600)
        try:
            for job in http_load.http_jobs(QUICK, ids, -1)["offline"]:
                peer.run(job)
            for workload, jobs in http_load.http_jobs(sizes, ids, 100 * number).items():
                seconds = sum(peer.run(job).seconds for job in jobs)
                rate = sum(job.num_output for job in jobs) / seconds
                yield {"server": IN_PROCESS, "workload": workload, "tokens_per_second": rate}
        finally:
            peer.stop()


def medians(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each server and workload: the median of each figure, the rates by round, and all errors."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["workload"], row["server"]), []).append(row)
    return [
        {
            **{key: median(row[key] for row in rounds) for key in rounds[0] if key.endswith(FIGURES)},
            "workload": workload,
            "server": server,
            "rates": [row["tokens_per_second"] for row in rounds],
            "errors": sorted({error for row in rounds for error in row.get("errors", ())}),
        }
        for (workload, server), rounds in found.items()
    ]


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    latencies = [f"{what}_{rank}_ms" for what, rank in product(LATENCIES, RANKS)]
    shown = (key.replace("_", " ").replace("ttft", "TTFT").replace("itl", "ITL") for key in latencies)
    table = Table("workload", "server", "output tokens/s", "least", "most", *shown, "errors")
    for row in rows:
        rates = row["tokens_per_second"], min(row["rates"]), max(row["rates"])
        cells = (f"{row[key]:.1f}" if key in row else "-" for key in latencies)
        errors = ", ".join(row["errors"]) or "-"
        table.add_row(row["workload"], row["server"], *(f"{rate:.0f}" for rate in rates), *cells, errors)
    console.print(table)


def gpu_name() -> str:
    """Return the name of the first GPU."""
    import torch

    return torch.cuda.get_device_name(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [IN_PROCESS, *(name for name in SERVERS if name != "serve")]
    parser.add_argument("--servers", nargs="+", choices=names, default=names, help="(all)")
    parser.add_argument("--model", choices=list(CONFIGS), default=MODEL, help="whose shape it has (%(default)s)")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="of Raydix's engine (%(default)s)"
    )
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="an eighth of the work")
    parser.add_argument("--home", type=Path, default=REPOSITORY / ".peers", help="where peers are installed")
    parser.add_argument(
        "--weights", type=Path, default=Path.home() / ".cache" / "raydix-bench", help="for the model"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    requests = max(http_load.REQUESTS, sizes.requests)
    settings = Settings(
        str(make_model(options.model, options.weights)),
        options.precision,
        options.threads,
        requests,
        sizes.max_len,
        replace(sizes, requests=requests).kv_tokens,
        options.device,
    )
    ids = range(FIRST_WORD, CONFIGS[options.model]["vocab_size"] - 1)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for number in range(options.rounds):
        in_turn = options.servers if number % 2 == 0 else options.servers[::-1]
        for name in [name for name in in_turn if name not in left_out]:
            print(f"round {number + 1}: {name}", flush=True)
            try:
                rows += rows_of(name, settings, sizes, ids, number, options.home)
            except (PeerFailed, aiohttp.ClientError) as failure:
                left_out[name] = str(failure)
                print(f"left out: {failure}", flush=True)
    show(Console(), medians(rows))
    if options.json:
        machine = this_machine.described() | ({"gpu": gpu_name()} if options.device == "cuda" else {})
        run = {
            "model": options.model,
            "precision": options.precision,
            "threads": options.threads,
            "rounds": options.rounds,
        }
        document = {"machine": machine, "run": run, "left_out": left_out, "rows": medians(rows)}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
