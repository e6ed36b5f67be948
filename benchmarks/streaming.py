"""Measure a streamed token over Raydix's wire, encrypted and not, and over a Serve handle generator.

    python -m benchmarks.streaming [--json benchmarks/results/streaming.json]

Starts the applications of `streaming_apps.py` on a free port in a private Ray, drives them from one asynchronous
client, and prints microseconds per token of all streams together. "http" is what a client sees, "hop" is engine
to ingress alone. The model costs nothing and generates as fast as it can; HTTP carries one chunk per token. The
applications take turns within each repetition, so that what else the machine does meets all of them.

All of that is done in each of Serve's modes, one after the other, each in a Ray of its own:

    default     as Serve ships: its proxy is in Python
    haproxy     RAY_SERVE_ENABLE_HA_PROXY=1: HAProxy sends requests to the ingress's own port
    throughput  the same with RAY_SERVE_THROUGHPUT_OPTIMIZED=1: gRPC between deployments, one event loop a process
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from benchmarks.private_ray import private_ray, start_proxy
from benchmarks.streaming_apps import handle_app, wire_app

STREAMS = (1, 8, 64)
APPS = ("wire", "plain", "handle")
MODES = {
    "default": {},
    "haproxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1"},
    "throughput": {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
}
"""What each mode has in its environment. Serve reads it while it is imported, in every process."""
MIN_TOKENS = 64
"""Tokens of a short stream."""
MIN_EXTRA = 400
"""Least additional tokens of a long stream: with fewer, the cost of starting a request hides theirs."""
Row = dict[str, Any]


def main() -> None:
    options = _options()
    if options.only is None:
        rows = [row for mode in MODES for row in _in_mode(mode, options)]
        _print(rows)
    else:
        with private_ray(num_cpus=2):
            rows = [{"mode": options.only, **row} for row in asyncio.run(_measure(_start(), options))]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": _machine(options.note), "rows": rows}, indent=1) + "\n")


def _in_mode(mode: str, options: argparse.Namespace) -> list[Row]:
    """Measure in a separate process. Raises CalledProcessError when that fails; its output says why."""
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.streaming", "--only", mode, "--json", str(found)]
        command += ["--tokens", str(options.tokens), "--repeat", str(options.repeat)]
        # With HAProxy, replicas would else wait for half a minute before they end.
        ending = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0"}
        subprocess.run(command, env=os.environ | ending | MODES[mode], check=True)
        rows: list[Row] = json.loads(found.read_text())["rows"]
        return rows


def _start() -> str:
    """Start the applications; returns the base URL."""
    port = start_proxy()
    serve.run(wire_app(encrypts=True), name="wire", route_prefix="/wire")
    serve.run(wire_app(encrypts=False), name="plain", route_prefix="/plain")
    serve.run(handle_app(), name="handle", route_prefix="/handle")
    return f"http://127.0.0.1:{port}"


async def _measure(base: str, options: argparse.Namespace) -> list[Row]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=300, limits=limits) as client:
        for app in APPS:
            await _http(client, app, 2, 50)  # warm-up
        return [row for num_streams in STREAMS for row in await _rows(client, num_streams, options)]


async def _rows(client: httpx.AsyncClient, num_streams: int, options: argparse.Namespace) -> list[Row]:
    """Measure all applications at one number of streams.

    A token's time is that of long streams minus that of short ones, divided by the difference in tokens, as the
    other costs of a request are in both.
    """
    extra = max(MIN_EXTRA, options.tokens // num_streams)
    lengths = (MIN_TOKENS, MIN_TOKENS + extra)
    http: dict[tuple[str, int], list[float]] = defaultdict(list)
    hop: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(options.repeat):
        for app, length in itertools.product(APPS, lengths):
            http[app, length].append(await _http(client, app, num_streams, length))
            hop[app, length].append(await _hop(client, app, num_streams, length))
    return [_row(app, num_streams, lengths, http, hop) for app in APPS]


def _row(
    app: str,
    num_streams: int,
    lengths: tuple[int, int],
    http: Mapping[tuple[str, int], list[float]],
    hop: Mapping[tuple[str, int], list[tuple[float, float]]],
) -> Row:
    short, long = ((min(http[app, length]), *min(hop[app, length])) for length in lengths)
    total = num_streams * (lengths[1] - lengths[0])
    return {
        "app": app,
        "streams": num_streams,
        "tokens_per_stream": lengths[1],
        "http_us_per_token": (long[0] - short[0]) / total * 1e6,
        "hop_us_per_token": (long[1] - short[1]) / total * 1e6,
        "http_ms_per_short_request": short[0] / num_streams * 1e3,
        "hop_tokens_per_read": num_streams * lengths[1] / long[2],
    }


async def _http(client: httpx.AsyncClient, app: str, num_streams: int, num_tokens: int) -> float:
    """Return the seconds until every stream has ended."""

    async def read() -> None:
        received = 0
        url, params = f"/{app}/stream", {"num_tokens": num_tokens}
        async with client.stream("GET", url, params=params) as response:
            async for chunk in response.aiter_raw():
                received += chunk.count(b"data:")
        assert received == num_tokens, f"{app}: {received} of {num_tokens} tokens arrived"

    began = time.perf_counter()
    await asyncio.gather(*(read() for _ in range(num_streams)))
    return time.perf_counter() - began


async def _hop(client: httpx.AsyncClient, app: str, num_streams: int, num_tokens: int) -> tuple[float, float]:
    """Return the seconds, and the number of deliveries to the readers."""
    params = {"num_streams": num_streams, "num_tokens": num_tokens}
    answer = (await client.get(f"/{app}/hop", params=params)).raise_for_status().json()
    return answer["seconds"], answer["reads"]


def _print(rows: list[Row]) -> None:
    table = Table(title="microseconds per token, one token per chunk")
    for column in ("mode", "streams", "path", "wire", "plain", "handle", "ratio"):
        table.add_column(column, justify="right")
    for mode, num_streams in itertools.product(MODES, STREAMS):
        found = {row["app"]: row for row in rows if (row["mode"], row["streams"]) == (mode, num_streams)}
        for path in ("http", "hop"):
            ours, plain, theirs = (found[app][f"{path}_us_per_token"] for app in APPS)
            each = [f"{value:.1f}" for value in (ours, plain, theirs)]
            table.add_row(mode, str(num_streams), path, *each, f"{theirs / ours:.1f}x")
    Console().print(table)


def _machine(note: str) -> dict[str, Any]:
    return {**this_machine.described(), "ray": ray.__version__, "note": note}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3200, help="tokens of all streams together")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each, of which the best counts")
    parser.add_argument("--only", choices=MODES, help="in this process, whose environment must have the mode's")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--note", default="", help="what else the machine was doing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
