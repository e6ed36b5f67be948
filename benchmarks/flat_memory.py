"""Ordinary service grows no process: memory after many requests of each kind, and after four times as many.

python -m benchmarks.flat_memory --requests 5000 --record
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.chaos_app import App, Size, started
from benchmarks.this_machine import described

RESULT = Path(__file__).parent / "results" / "flat_memory.json"
MIB = 2**20
LONGEST_GROWTH_MIB = 5.0
LONGEST_PAUSE_S = 0.005
SETTLE_S = 120.0
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What does len do?"}],
    "max_tokens": 2,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chats": ("/v1/chat/completions", CHAT),
    "streams": ("/v1/chat/completions", CHAT | {"stream": True}),
    "errors": ("/v1/chat/completions", CHAT | {"max_tokens": -1}),
    "disconnects": ("/v1/chat/completions", CHAT | {"stream": True, "max_tokens": 200}),
    "new connections": ("/v1/chat/completions", CHAT),
    "tools": ("/v1/chat/completions", CHAT | {"tools": [TOOL]}),
    "JSON": ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}),
}
CLIENTS = 4
CLIENT = """
import http.client, json, sys

port, kind, path, body, num = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])
client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
for _ in range(num):
    client.request("POST", path, body.encode(), {"content-type": "application/json"})
    answer = client.getresponse()
    if kind == "disconnects":
        answer.read(1)
        client.close()
    else:
        answer.read()
    if kind == "new connections":
        client.close()
"""


def main() -> None:
    """Measure, print a table and, with --record, write the result. Exits with 1 when a process grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000, help="of each kind before the first look")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    with started(Size(replicas=1)) as app:
        try:
            result = asyncio.run(_measure(app, options.requests))
        finally:
            app.close()
    _show(result)
    if options.record:
        RESULT.write_text(json.dumps({"machine": described(), **result}, indent=1) + "\n")
    grown = [name for name, mib in result["grown_mib"].items() if mib > LONGEST_GROWTH_MIB]
    sys.exit(1 if grown or result["longest_full_collection_s"] > LONGEST_PAUSE_S else 0)


async def _measure(app: App, requests: int) -> dict[str, Any]:
    if not await app.until(app.is_whole, SETTLE_S):
        raise RuntimeError(f"the application did not come up: {await app.health()}")
    began = time.monotonic()
    await asyncio.to_thread(_ask_all, app, requests)
    before, collections = await _memory(app), await _full_collections(app)
    await asyncio.to_thread(_ask_all, app, 3 * requests)
    after = await _memory(app)
    return {
        "requests_of_each_kind": [requests, 4 * requests],
        "kinds": list(ASKS),
        "mib": [before, after],
        "grown_mib": {name: round(after[name] - before[name], 1) for name in after},
        "longest_full_collection_s": _longest(collections, await _full_collections(app)),
        "seconds": round(time.monotonic() - began),
    }


def _ask_all(app: App, num: int) -> None:
    """Send so many requests of each kind, one kind after the other, from several processes."""
    port = app.url.rpartition(":")[2]
    for kind, (path, body) in ASKS.items():
        command = [sys.executable, "-c", CLIENT, port, kind, path, json.dumps(body), str(num // CLIENTS)]
        clients = [subprocess.Popen(command) for _ in range(CLIENTS)]
        codes = [client.wait() for client in clients]
        if any(codes):
            raise RuntimeError(f"a client of {kind} failed")


async def _memory(app: App) -> dict[str, float]:
    """Return the resident memory of each kind of process in MiB, when nothing runs."""

    async def is_quiet() -> bool:
        return not await app.metric("raydix_open_streams")

    await app.until(is_quiet, SETTLE_S)
    await asyncio.sleep(3.0)
    kinds = {"ingress": app.ingresses(), "engine": app.engines(), "hub": app.hubs()}
    return {
        kind: round(max(psutil.Process(pid).memory_info().rss for pid in pids) / MIB, 1)
        for kind, pids in kinds.items()
    }


async def _full_collections(app: App) -> dict[float, float]:
    """Return how many full collections took at most so many seconds, of all processes."""
    counts: dict[float, float] = {}
    for labels, count in await app.samples("raydix_gc_pause_seconds_bucket", generation="2"):
        counts[float(labels["le"])] = counts.get(float(labels["le"]), 0.0) + count
    return counts


def _longest(before: dict[float, float], after: dict[float, float]) -> float:
    """Return the least bound in seconds that all collections between two looks keep; 0 if there were none."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    most = max(counts.values(), default=0.0)
    return min(bound for bound, count in counts.items() if count == most) if most else 0.0


def _show(result: dict[str, Any]) -> None:
    first, last = result["requests_of_each_kind"]
    table = Table("process", f"MiB after {first}", f"after {last} of each kind", "grown")
    for name, grown in result["grown_mib"].items():
        table.add_row(name, *(str(mib[name]) for mib in result["mib"]), str(grown))
    Console().print(table, f"longest full collection: {result['longest_full_collection_s']} s")


if __name__ == "__main__":
    main()
