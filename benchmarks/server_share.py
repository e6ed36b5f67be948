"""Measure how much of the engine's rate a server keeps: `LLM` and `raydix serve`, asked the same in turns.

    python -m benchmarks.server_share [--precision bfloat16] [--turns 6]
                                      [--json benchmarks/results/server_share.json]

`compare_http.py` measures servers one after the other, minutes apart, in which a machine's speed may change by
half. Here the engine in process and a server are up at the same time, and each workload goes to both, one directly
after the other, in an order that every other turn reverses. The server's processes are stopped (SIGSTOP) while the
engine in process computes, so that they take nothing from it. A turn's share is the server's rate divided by the
engine's; the figures are the medians of the turns.

The servers are `compare_http.py`'s "direct", as it ships, and "unbounded", whose steps are bounded as `LLM`'s are,
and the workloads are its own. The client shares the processors with the server. There are two engines at a time,
so it is for CPUs alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from benchmarks.peers import http_load
from benchmarks.peers.models import CONFIGS, FIRST_WORD, make_model
from benchmarks.peers.process import RAYDIX, REPOSITORY, Peer
from benchmarks.peers.protocol import Job, Settings
from benchmarks.peers.servers import Running, serving
from benchmarks.peers.workloads import FULL, QUICK, Sizes

MODEL = "llama-15m"
SERVERS = ("direct", "unbounded")
REST_S = 0.5
"""Time in which a server that goes on does what fell due while it was stopped."""

Ask = Callable[[Sequence[Job]], float]
"""Puts jobs, one after the other, and returns output tokens per second."""


@dataclass(slots=True)
class Turn:
    """Output tokens per second of a workload, once by each, one directly after the other."""

    workload: str
    in_process: float
    server: float


@contextlib.contextmanager
def stopped(server: Running) -> Iterator[None]:
    """Stop all processes of a server, and let them go on."""
    processes = list(server.processes())
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        while any(map(_runs, processes)):  # the signal takes effect when the process is next on a processor
            time.sleep(0.001)
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        time.sleep(REST_S)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def take_turns(asked: Sequence[dict[str, list[Job]]], in_process: Ask, server: Ask) -> list[Turn]:
    """Put each of these sets of workloads to both; every other one to the server first."""
    turns = []
    for number, workloads in enumerate(asked):
        order = (in_process, server) if number % 2 == 0 else (server, in_process)
        for name, jobs in workloads.items():
            rates = {ask: ask(jobs) for ask in order}
            turns.append(Turn(name, rates[in_process], rates[server]))
    return turns


def rows_of(server: str, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return a row for each workload, in the order of the first turn."""
    rows = []
    for workload in dict.fromkeys(turn.workload for turn in turns):
        own = [turn for turn in turns if turn.workload == workload]
        shares = [turn.server / turn.in_process for turn in own]
        rows.append(
            {
                "workload": workload,
                "server": server,
                "in_process_tokens_per_second": median(turn.in_process for turn in own),
                "tokens_per_second": median(turn.server for turn in own),
                "share": median(shares),
                "shares": shares,
            }
        )
    return rows


def measure(name: str, settings: Settings, sizes: Sizes, ids: range, turns: int) -> list[dict[str, Any]]:
    """Return the rows of a server. Raises PeerFailed when it or the engine does not come up."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        engine = Peer(RAYDIX, REPOSITORY, settings, Path(directory) / "log", timeout_s=600)
        stack.callback(engine.stop)
        server = stack.enter_context(serving(name, settings, REPOSITORY))

        def in_process(jobs: Sequence[Job]) -> float:
            with stopped(server):
                seconds = sum(engine.run(job).seconds for job in jobs)
            return sum(job.num_output for job in jobs) / seconds

        def over_http(jobs: Sequence[Job]) -> float:
            return asyncio.run(_ask(server, jobs))

        warm_up = http_load.http_jobs(QUICK, ids, -1)["offline"]
        in_process(warm_up)
        over_http(warm_up)
        asked = [http_load.http_jobs(sizes, ids, 100 * number) for number in range(turns)]
        return rows_of(name, take_turns(asked, in_process, over_http))


async def _ask(server: Running, jobs: Sequence[Job]) -> float:
    """Raises RuntimeError when a request fails."""
    connections, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(600)
    async with aiohttp.ClientSession(
        server.url, connector=connections, timeout=timeout, raise_for_status=True
    ) as client:
        samples, seconds = await http_load.run_jobs(client, server.model, list(jobs))
    if errors := {sample.error for sample in samples if sample.error}:
        raise RuntimeError(f"{server.name}: {', '.join(sorted(errors))}")
    return sum(sample.output_tokens for sample in samples) / seconds


def show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    table = Table("workload", "server", "in process, tokens/s", "server, tokens/s", "share", "least", "most")
    for row in rows:
        shares = row["share"], min(row["shares"]), max(row["shares"])
        rates = row["in_process_tokens_per_second"], row["tokens_per_second"]
        table.add_row(
            row["workload"],
            row["server"],
            *(f"{rate:.0f}" for rate in rates),
            *(f"{share:.0%}" for share in shares),
        )
    console.print(table)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS, help="(both)")
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine (%(default)s)"
    )
    parser.add_argument("--turns", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="an eighth of the work")
    parser.add_argument(
        "--weights", type=Path, default=Path.home() / ".cache" / "raydix-bench", help="for the model"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.turns < 1:
        parser.error("--turns must be at least 1")
    sizes = QUICK if options.quick else FULL
    requests = max(http_load.REQUESTS, sizes.requests)
    model = str(make_model(MODEL, options.weights))
    kv_tokens = replace(sizes, requests=requests).kv_tokens
    settings = Settings(model, options.precision, options.threads, requests, sizes.max_len, kv_tokens)
    ids = range(FIRST_WORD, CONFIGS[MODEL]["vocab_size"] - 1)
    rows = [row for name in options.servers for row in measure(name, settings, sizes, ids, options.turns)]
    show(Console(), rows)
    if options.json:
        run = {"model": MODEL, "precision": options.precision, "threads": options.threads, "turns": options.turns}
        document = {"machine": this_machine.described(), "run": run, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
