"""Compare servers on a CPU over HTTP: Raydix, vLLM's own and Ray Serve LLM, and Raydix's engine without a server.

    benchmarks/peers/install.sh vllm rayllm          # once; what is not installed is left out
    python -m benchmarks.compare_http [--quick] [--json benchmarks/results/compare_http.json]

All serve `compare.py`'s Llama of 15M parameters with the same precision and threads, in float32, which all compute
well on any CPU, if nothing else is asked for. They are asked the same by
`benchmarks/peers/http_load.py`: single streams one after the other, many prompts at once, many with a shared
prefix, cold and warm. "in process" is the same work through Raydix's `LLM`: what a server loses of that is its
overhead. Servers take turns; of several rounds the best counts. The client shares the processors with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
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
IDS = range(FIRST_WORD, CONFIGS[MODEL]["vocab_size"] - 1)
IN_PROCESS = "in process"
Row = dict[str, Any]


def rows_of(
    name: str, settings: Settings, sizes: Sizes, number: int, options: argparse.Namespace
) -> Iterator[Row]:
    """Yield one round's figures of a server, or of the engine in process, a row for each workload."""
    if name == IN_PROCESS:
        yield from in_process(settings, sizes, number, options.home)
        return
    with serving(name, settings, options.home) as server:
        found = asyncio.run(http_load.measure(server.url, sizes, IDS, seed=100 * number))
    for workload, row in found.items():
        yield {
            "server": name,
            "workload": workload,
            "tokens_per_second": row["output_tokens_per_second"],
            "ttft_p50_ms": row["latency"]["ttft"]["p50"] * 1e3,
            "errors": row["errors"],
        }


def in_process(settings: Settings, sizes: Sizes, number: int, home: Path) -> Iterator[Row]:
    """Yield the figures of Raydix's offline API, for the same jobs."""
    with tempfile.TemporaryDirectory() as directory:
        peer = Peer(RAYDIX, home, settings, Path(directory) / "log", timeout_s=600)
        try:
            for job in http_load.http_jobs(QUICK, IDS, -1)["offline"]:
                peer.run(job)
            for workload, jobs in http_load.http_jobs(sizes, IDS, 100 * number).items():
                seconds = sum(peer.run(job).seconds for job in jobs)
                rate = sum(job.num_output for job in jobs) / seconds
                yield {"server": IN_PROCESS, "workload": workload, "tokens_per_second": rate}
        finally:
            peer.stop()


def best(rows: list[Row]) -> list[Row]:
    """Return the row with the highest rate for each server and workload, with the lowest rate beside it."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row["server"], row["workload"]
        known = found.get(key)
        worst = min(row["tokens_per_second"], known["worst"] if known else row["tokens_per_second"])
        better = row if known is None or row["tokens_per_second"] > known["tokens_per_second"] else known
        found[key] = {**better, "worst": worst}
    return list(found.values())


def show(console: Console, rows: list[Row]) -> None:
    """Print the rows as a table."""
    table = Table("workload", "server", "output tokens/s", "worst", "TTFT p50, ms", "errors")
    for row in sorted(rows, key=lambda row: str(row["workload"])):
        first = f"{row['ttft_p50_ms']:.1f}" if "ttft_p50_ms" in row else "-"
        rates = f"{row['tokens_per_second']:.0f}", f"{row['worst']:.0f}"
        table.add_row(row["workload"], row["server"], *rates, first, ", ".join(row.get("errors", ())) or "-")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [IN_PROCESS, *(name for name in SERVERS if name != "serve")]
    parser.add_argument("--servers", nargs="+", choices=names, default=names, help="(all)")
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=2)
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
        str(make_model(MODEL, options.weights)),
        options.precision,
        options.threads,
        requests,
        sizes.max_len,
        replace(sizes, requests=requests).kv_tokens,
    )
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for number in range(options.rounds):
        for name in [name for name in options.servers if name not in left_out]:
            print(f"round {number + 1}: {name}", flush=True)
            try:
                rows += rows_of(name, settings, sizes, number, options)
            except (PeerFailed, aiohttp.ClientError) as failure:
                left_out[name] = str(failure)
                print(f"left out: {failure}", flush=True)
    show(Console(), best(rows))
    if options.json:
        machine = this_machine.described()
        run = {"precision": options.precision, "threads": options.threads, "rounds": options.rounds}
        document = {"machine": machine, "run": run, "left_out": left_out, "rows": best(rows)}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
