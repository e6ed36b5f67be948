"""Measure what a cached chat costs on its way in and out, in processor time by process, beside a bare web server.

    python -m benchmarks.front_door [--seconds 5] [--rounds 5] [--json benchmarks/results/front_door.json]

    starlette    a bare Starlette on uvicorn that parses, renders and tokenizes the same chats, and answers at once
    prototype    an ASGI function and Raydix's engine, with one ZeroMQ socket between (`bare_servers.py`)
    direct       `raydix serve`: one engine, and one ingress that listens itself
    serve        the same behind Serve's HTTP proxy
    vllm, vllm_rust, rayllm, rayllm_direct
                 vLLM's own server and Ray Serve LLM with vLLM's engine, each as it ships and in its faster mode
                 (`benchmarks/peers/servers.py`), where they are installed (`benchmarks/peers/install.sh`)

All have the embedded model, in float32, which all compute well on any CPU, and one thread for it. The chats share
a system prompt, which the engine's cache holds, and ask for one token. 1, 8 and 64 clients ask for some seconds
each; then 128 clients ask for a stream of 64 tokens each, all at once. The clients share the processors with the
server: rates are those of the whole machine. Processor time is that of each process while it is measured, by what
the process is, per request; for the streams, per event, which may bring several tokens.

A machine's speed may change by half within minutes. So the first three, which are compared closely, run at the
same time and are asked in turns of 2 s, in `--rounds` rounds, of which every other one goes the other way round. A
server's figure is the median of its rounds. While one is asked the others only idle, and the time that they take
counts for none; for Raydix that is some percent of a core, as the last table says. The other servers follow one
after the other, each alone, with `--seconds` for each number of clients.

Then "direct" runs with 1, 2 and 4 ingresses, which share their port, and with 16 clients for each of them: what a
request costs should stay. Each runs twice, the second time in the opposite order, and the mean of both is told. At
last it runs with 1 and 4 ingresses and nobody asks: what each process takes then, in percent of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from benchmarks.peers.process import REPOSITORY, PeerFailed
from benchmarks.peers.protocol import Settings
from benchmarks.peers.servers import SERVERS, Running, serving
from benchmarks.private_ray import free_port
from engine.program.engine import model_directory
from engine.settings.config import EngineConfig

BARE = ("starlette", "prototype")
IN_TURNS = (*BARE, "direct")
TURN_S = 2.0
STREAM_ROUNDS = 3
"""Most rounds of the streams, each of which takes as long as several turns."""
PARTS = ("turns", "alone", "scaling", "idle")
"""Parts of the measurement: servers in turns, the others, several ingresses, nobody who asks."""
CLIENTS = (1, 8, 64)
INGRESSES = (1, 2, 4)
CLIENTS_PER_INGRESS = 16
WARM_UP_PER_INGRESS_S = 5.0
"""Each of several ingresses gets a part of the requests, and its first few hundred cost half as much again."""
IDLE_INGRESSES = (1, 4)
IDLE_S = 20.0
SETTLE_S = 5.0
"""Seconds after the last request before a server counts as idle."""
STREAMS = 128
STREAM_TOKENS = 64
NUMBERS = itertools.count()
"""Numbers of questions. Each is asked once, so that later rounds do not find it in the cache."""
WARM_UP_S = 2.0
SYSTEM = "You are a helpful assistant. " * 12
ROLES = {
    ":Ingress": "ingress",
    ":EngineReplica": "engine",
    "bare_servers starlette": "ingress",
    "bare_servers door": "ingress",
    "bare_servers engine": "engine",
    ":OpenAiIngress": "ingress",
    "VLLM::": "engine",
    ":LLMServer": "engine",
    "vllm.entrypoints": "ingress",
    "vllm-rs": "ingress",
    ":LLMRouter": "ingress",
    "ray::ProxyActor": "proxy",
    "ray::HAProxyManager": "proxy",
    "haproxy": "proxy",
    "ray::Serve": "Serve",
}
"""Roles of processes, by what their command lines contain; all others are Ray's."""
PROCESSES = {
    ":Ingress": "ingress",
    ":EngineReplica": "engine",
    ":MetricsHub": "hub",
    "ray::ServeController": "Serve's controller",
    "ray::DashboardAgent": "Ray's agent",
    "log_monitor": "Ray's log monitor",
    "gcs_server": "GCS",
    "raylet/raylet": "raylet",
    "deployments.cli": "raydix serve",
}
"""The same, told apart where they are idle."""
Row = dict[str, Any]
Load = Callable[[Running], Row]
"""Asks a server, and returns its figures."""


# --- the servers -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bare(name: str) -> Iterator[Running]:
    """Start one of `bare_servers.py`, in processes of its own. Raises PeerFailed when one of them ends."""
    port, endpoint = free_port(), f"tcp://127.0.0.1:{free_port()}"
    wanted = {
        "starlette": [["starlette", str(port)]],
        "prototype": [["engine", endpoint], ["door", str(port), endpoint]],
    }
    module = [sys.executable, "-m", "benchmarks.bare_servers"]
    processes = [subprocess.Popen([*module, *words], stdin=subprocess.DEVNULL) for words in wanted[name]]
    url = f"http://127.0.0.1:{port}"
    try:
        while all(process.poll() is None for process in processes):
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{url}/v1/chat/completions", json=chat("demo", "", 1), timeout=60)
                break
            time.sleep(0.1)
        else:
            raise PeerFailed(f"{name} ended before it answered: see what its process printed")
        yield Running(name, url, "demo", tuple(psutil.Process(process.pid) for process in processes))
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def started(name: str, home: Path, ingresses: int = 1) -> contextlib.AbstractContextManager[Running]:
    """Start a server with the embedded model; `home` is where peers are installed."""
    if name in BARE:
        return bare(name)
    model = str(model_directory(EngineConfig(model="demo")))
    settings = Settings(model, "float32", threads=1, max_requests=STREAMS, max_len=512, kv_tokens=65_536)
    return serving(name, settings, home, ingresses)


def processor_seconds(server: Running, roles: Mapping[str, str] = ROLES) -> dict[str, float]:
    """Return the processor time of the server's processes until now, by their roles."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            command, times = " ".join(process.cmdline()), process.cpu_times()
            role = next((role for part, role in roles.items() if part in command), "Ray")
            seconds[role] += times.user + times.system
    return seconds


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


async def ask_for(server: Running, num_clients: int, seconds: float) -> list[float]:
    """Have clients ask one request after the other; return the times to first text, in seconds."""
    found: list[float] = []
    until = time.perf_counter() + seconds

    async def one(client: aiohttp.ClientSession) -> None:
        while time.perf_counter() < until:
            question = f"What does itertools.chain do? {next(NUMBERS):06}"
            first, _ = await ask(client, chat(server.model, question, 1))
            found.append(first)

    async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as client:
        await asyncio.gather(*(one(client) for _ in range(num_clients)))
    return found


async def stream_at_once(server: Running) -> tuple[list[float], int]:
    """Ask for all streams at once; return the times to first text and the number of events."""
    async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as client:
        stories = [f"Tell a story about number {next(NUMBERS):06}." for _ in range(STREAMS)]
        bodies = [chat(server.model, story, STREAM_TOKENS) for story in stories]
        streams = await asyncio.gather(*(ask(client, body) for body in bodies))
    return [first for first, _ in streams], sum(events for _, events in streams)


# --- the measurement ---------------------------------------------------------------------------------------


def measured(names: Sequence[str], home: Path, seconds: float, rounds: int) -> list[Row]:
    """Run servers at the same time, and return each one's rows; servers that do not come up are left out."""
    with contextlib.ExitStack() as stack:
        servers: list[Running] = []
        for name in names:
            try:
                servers.append(stack.enter_context(started(name, home)))
            except PeerFailed as failure:
                print(f"left out: {failure}", flush=True)
        for server in servers:
            asyncio.run(ask_for(server, CLIENTS[1], WARM_UP_S))
        loads = [partial(_requests, num_clients=num_clients, seconds=seconds) for num_clients in CLIENTS]
        rows = take_turns(servers, loads, rounds)
        streaming = [server for server in servers if server.name != "starlette"]  # which knows one token only
        rows += take_turns(streaming, [_streams], min(rounds, STREAM_ROUNDS))
    return sorted(rows, key=lambda row: names.index(row["server"]))


def take_turns(servers: Sequence[Running], loads: Sequence[Load], rounds: int) -> list[Row]:
    """Put each load on one server after the other, in several rounds; return the medians, by load and server.

    Every other round begins with the last server: a machine that becomes slower or faster meanwhile favours none.
    """
    found: dict[tuple[int, str], list[Row]] = {
        (place, server.name): [] for place in range(len(loads)) for server in servers
    }
    for number in range(rounds):
        for place, load in enumerate(loads):
            for server in servers if number % 2 == 0 else servers[::-1]:
                found[place, server.name].append(load(server))
    return [_median(rows) for rows in found.values()]


def _median(rounds: Sequence[Row]) -> Row:
    """Return a row with the median of each figure, and the rates of all rounds, in their order."""
    first = rounds[0]
    roles = sorted({role for row in rounds for role in row["processor_ms"]})
    return {
        **first,
        **{key: median(row[key] for row in rounds) for key, value in first.items() if isinstance(value, float)},
        "processor_ms": {role: median(row["processor_ms"].get(role, 0.0) for row in rounds) for role in roles},
        "per_second_by_round": [row["per_second"] for row in rounds],
    }


def _requests(server: Running, num_clients: int, seconds: float) -> Row:
    before, began = processor_seconds(server), time.perf_counter()
    firsts = asyncio.run(ask_for(server, num_clients, seconds))
    what = f"{num_clients} clients" if num_clients > 1 else "1 client"
    return _row(server, what, firsts, len(firsts), before, began)


def _streams(server: Running) -> Row:
    before, began = processor_seconds(server), time.perf_counter()
    firsts, events = asyncio.run(stream_at_once(server))
    row = _row(server, f"{STREAMS} streams", firsts, events, before, began)
    return {**row, "tokens_per_event": STREAMS * STREAM_TOKENS / events}


def _row(
    server: Running, what: str, firsts: list[float], count: int, before: dict[str, float], began: float
) -> Row:
    elapsed, ordered = time.perf_counter() - began, sorted(firsts)
    spent = {role: seconds - before.get(role, 0.0) for role, seconds in processor_seconds(server).items()}
    return {
        "server": server.name,
        "what": what,
        "per_second": count / elapsed,
        "ttft_p50_ms": ordered[len(ordered) // 2] * 1e3,
        "ttft_p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3,
        "processor_ms": {role: seconds / count * 1e3 for role, seconds in sorted(spent.items())},
    }


def show(console: Console, rows: list[Row]) -> None:
    """Print the rows as a table."""
    columns = ("server", "what", "requests/s or events/s", "TTFT p50, ms", "p99", "processor ms each", "of which")
    table = Table(*columns)
    for row in rows:
        spent = row["processor_ms"]
        what = row["what"] + (f", {row['ingresses']} ingresses" if "ingresses" in row else "")
        if "tokens_per_event" in row:
            what += f", {row['tokens_per_event']:.1f} tokens per event"
        table.add_row(
            row["server"], what, f"{row['per_second']:.0f}",
            f"{row['ttft_p50_ms']:.1f}", f"{row['ttft_p99_ms']:.1f}",
            f"{sum(spent.values()):.2f}", ", ".join(f"{role} {each:.2f}" for role, each in spent.items()),
        )  # fmt: skip
    console.print(table)


def scaling(options: argparse.Namespace) -> list[Row]:
    """Return a row for each number of ingresses, all with the same number of clients for each ingress."""
    runs: dict[int, list[Row]] = {count: [] for count in INGRESSES}
    for count in (*INGRESSES, *reversed(INGRESSES)):
        with started("direct", options.home, count) as server:
            asyncio.run(ask_for(server, CLIENTS_PER_INGRESS * count, WARM_UP_PER_INGRESS_S * count))
            runs[count].append(_requests(server, CLIENTS_PER_INGRESS * count, options.seconds))
    return [{**_median(rows), "ingresses": count} for count, rows in runs.items()]


def idle(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each number of ingresses: what processes take while nobody asks, in percent of a core."""
    for count in IDLE_INGRESSES:
        with started("direct", options.home, count) as server:
            asyncio.run(ask_for(server, CLIENTS[1], WARM_UP_S))
            time.sleep(SETTLE_S)
            before, began = processor_seconds(server, PROCESSES), time.perf_counter()
            time.sleep(IDLE_S)
            after, elapsed = processor_seconds(server, PROCESSES), time.perf_counter() - began
            percent = {part: (spent - before.get(part, 0.0)) / elapsed * 100 for part, spent in after.items()}
            yield {"ingresses": count, "percent": percent}


def show_idle(console: Console, rows: list[Row]) -> None:
    """Print what each process takes while nobody asks, as a table."""
    table = Table("while nobody asks, % of a core", *(f"ingresses: {row['ingresses']}" for row in rows))
    for part in sorted(rows[0]["percent"], key=lambda part: -rows[0]["percent"][part]):
        table.add_row(part, *(f"{row['percent'].get(part, 0.0):.1f}" for row in rows))
    table.add_row("all", *(f"{sum(row['percent'].values()):.1f}" for row in rows))
    console.print(table)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, checked; argparse ends the program with a usage message when they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    alone = "time for each number of clients, of servers that are measured alone (%(default)s)"
    parser.add_argument("--seconds", type=float, default=5.0, help=alone)
    parser.add_argument("--rounds", type=int, default=5, help="of the servers that take turns (%(default)s)")
    parser.add_argument("--json", type=Path)
    names = [*BARE, *(name for name in SERVERS if name != "unbounded")]
    parser.add_argument("--servers", nargs="+", choices=names, default=names, help="(all)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of the measurement (all)")
    parser.add_argument("--home", type=Path, default=REPOSITORY / ".peers", help="where peers are installed")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    return options


def main() -> None:
    options = parse_args()
    rows: list[Row] = []
    if "turns" in options.parts:
        together = [name for name in IN_TURNS if name in options.servers]
        rows += measured(together, options.home, TURN_S, options.rounds)
    if "alone" in options.parts:
        for name in options.servers:
            if name not in IN_TURNS:
                rows += measured([name], options.home, options.seconds, rounds=1)
    parts = options.parts if "direct" in options.servers else ()
    scaled = scaling(options) if "scaling" in parts else []
    unasked = list(idle(options)) if "idle" in parts else []
    show(Console(), [*rows, *scaled])
    if unasked:
        show_idle(Console(), unasked)
    if options.json:
        machine = this_machine.described()
        turns = {"seconds": TURN_S, "rounds": options.rounds, "stream_rounds": min(options.rounds, STREAM_ROUNDS)}
        found = {"machine": machine, "turns": turns, "rows": rows, "scaling": scaled, "idle": unasked}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
