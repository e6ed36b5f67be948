"""Measure what a cached chat costs on its way in and out, in processor time by process, beside a bare web server.

    python -m benchmarks.front_door [--seconds 5] [--json benchmarks/results/front_door.json]

    starlette    a bare Starlette on uvicorn that parses, renders and tokenizes the same chats, and answers at once
    direct       `raydix serve` with the embedded model, one engine, and one ingress that listens itself
    serve        the same behind Serve's HTTP proxy

The chats share a system prompt, which the engine's cache holds, and ask for one token. 1, 8 and 64 clients ask for
some seconds each; then 128 clients ask for a stream of 64 tokens each, all at once. The clients share the
processors with the server, so rates are those of the whole machine. Processor time is that of each process while
it is measured, by what the process is, per request; for the streams, per event.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.peers import raydix_server
from benchmarks.peers.protocol import Settings
from benchmarks.private_ray import free_port

CLIENTS = (1, 8, 64)
STREAMS = 128
STREAM_TOKENS = 64
WARM_UP_S = 2.0
SYSTEM = "You are a helpful assistant. " * 12
ROLES = {
    ":Ingress": "ingress",
    ":EngineReplica": "engine",
    "ray::ProxyActor": "proxy",
    "ray::Serve": "Serve",
    "benchmarks.front_door": "starlette",
}
"""Roles of processes, by what their command lines contain; all others of Raydix are Ray's."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Arm:
    """A running server."""

    name: str
    url: str
    model: str
    root: psutil.Process
    """The process that was started; its descendants are the server's processes too."""

    def processor_seconds(self) -> dict[str, float]:
        """Return the processor time of the server's processes until now, by their roles."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for process in (self.root, *self.root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                command, times = " ".join(process.cmdline()), process.cpu_times()
                role = next((role for part, role in ROLES.items() if part in command), "Ray")
                seconds[role] += times.user + times.system
        return seconds


# --- the servers -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def starlette() -> Iterator[Arm]:
    """Start the bare server in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.front_door", "--serve", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{url}/v1/chat/completions", json=chat("demo", "", 1), timeout=5)
                break
            time.sleep(0.1)
        yield Arm("starlette", url, "demo", psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait()


def serve_bare(port: int) -> None:
    """Serve chats with a bare Starlette until the process is ended."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    from deployments.api.text_codec import TextCodec
    from deployments.config.args import ModelArgs
    from engine.config import EngineConfig
    from engine.engine import model_directory
    from engine.tokenizer import load_tokenizer

    model = ModelArgs(engine=EngineConfig(model="demo"))
    codec = TextCodec(load_tokenizer(model_directory(model.engine)), model.chat)

    async def answer(request: Request) -> StreamingResponse:
        ids = codec.encode_chat((await request.json())["messages"])
        event = {
            "choices": [{"index": 0, "delta": {"content": codec.decode(ids[-1:])}, "finish_reason": "length"}]
        }

        async def events() -> Any:
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


@contextlib.contextmanager
def raydix(http: str) -> Iterator[Arm]:
    """Start `raydix serve` with one engine and one ingress; `http` is the setting `ingresses.http`."""
    settings = Settings("demo", "float32", threads=1, max_requests=STREAMS, max_len=512, kv_tokens=65_536)
    before = set(psutil.Process().children())
    with raydix_server.serving(settings, http) as url:
        (root,) = set(psutil.Process().children()) - before
        yield Arm(http, url, "demo", root)


# --- the clients -------------------------------------------------------------------------------------------


def chat(model: str, question: str, max_tokens: int) -> dict[str, Any]:
    """Return the body of a request."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {
        "model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip


async def ask(client: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[float, int]:
    """Send a request; return the seconds to its first text and the number of its events with text."""
    asked = time.perf_counter()
    first, events = 0.0, 0
    async with client.post("/v1/chat/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {") and b'"content":' in line and b'"content":""' not in line:
                first = first or time.perf_counter() - asked
                events += 1
    return first, events


async def ask_for(arm: Arm, num_clients: int, seconds: float) -> list[float]:
    """Have clients ask one request after the other; return the times to first text, in seconds."""
    found: list[float] = []
    until = time.perf_counter() + seconds

    async def one(client: aiohttp.ClientSession, number: int) -> None:
        count = 0
        while time.perf_counter() < until:
            count += 1
            first, _ = await ask(client, chat(arm.model, f"What does itertools.chain do? {number} {count}", 1))
            found.append(first)

    async with aiohttp.ClientSession(arm.url, connector=aiohttp.TCPConnector(limit=0)) as client:
        await asyncio.gather(*(one(client, number) for number in range(num_clients)))
    return found


async def stream_at_once(arm: Arm) -> tuple[list[float], int]:
    """Ask for all streams at once; return the times to first text and the number of events."""
    async with aiohttp.ClientSession(arm.url, connector=aiohttp.TCPConnector(limit=0)) as client:
        bodies = [
            chat(arm.model, f"Tell a story about number {number}.", STREAM_TOKENS) for number in range(STREAMS)
        ]
        streams = await asyncio.gather(*(ask(client, body) for body in bodies))
    return [first for first, _ in streams], sum(events for _, events in streams)


# --- the measurement ---------------------------------------------------------------------------------------


def measure(arm: Arm, seconds: float) -> Iterator[Row]:
    """Yield a row for each number of clients, and one for the streams."""
    asyncio.run(ask_for(arm, CLIENTS[1], WARM_UP_S))
    for num_clients in CLIENTS:
        before, began = arm.processor_seconds(), time.perf_counter()
        firsts = asyncio.run(ask_for(arm, num_clients, seconds))
        what = f"{num_clients} clients" if num_clients > 1 else "1 client"
        yield _row(arm, what, firsts, len(firsts), before, began)
    if arm.name == "starlette":
        return
    before, began = arm.processor_seconds(), time.perf_counter()
    firsts, events = asyncio.run(stream_at_once(arm))
    yield _row(arm, f"{STREAMS} streams", firsts, events, before, began)


def _row(arm: Arm, what: str, firsts: list[float], count: int, before: dict[str, float], began: float) -> Row:
    elapsed, ordered = time.perf_counter() - began, sorted(firsts)
    spent = {role: seconds - before.get(role, 0.0) for role, seconds in arm.processor_seconds().items()}
    return {
        "server": arm.name,
        "what": what,
        "per_second": count / elapsed,
        "ttft_p50_ms": ordered[len(ordered) // 2] * 1e3,
        "ttft_p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3,
        "processor_ms": {role: seconds / count * 1e3 for role, seconds in sorted(spent.items())},
    }


def show(console: Console, rows: list[Row]) -> None:
    """Print the rows as a table."""
    table = Table(
        "server", "what", "requests/s or events/s", "TTFT p50, ms", "p99", "processor ms each", "of which"
    )
    for row in rows:
        parts = ", ".join(f"{role} {spent:.2f}" for role, spent in row["processor_ms"].items())
        table.add_row(
            row["server"], row["what"], f"{row['per_second']:.0f}", f"{row['ttft_p50_ms']:.1f}",
            f"{row['ttft_p99_ms']:.1f}", f"{sum(row['processor_ms'].values()):.2f}", parts,
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each number of clients (%(default)s)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve_bare(options.serve)
    rows: list[Row] = []
    for server in (starlette(), raydix("direct"), raydix("serve")):
        with server as arm:
            rows += measure(arm, options.seconds)
    show(Console(), rows)
    if options.json:
        machine = {"cpus": os.cpu_count(), "platform": f"{platform.system()} {platform.machine()}"}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
