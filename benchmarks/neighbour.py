"""Measure what one client's flood costs another client's answers, and the ingress in memory.

    python -m benchmarks.neighbour [--samples 60] [--only "400 chats"] [--json benchmarks/results/neighbour.json]

Starts the embedded model with two tenants, one ingress and one engine. The quiet tenant asks for one short answer
after another and sends a ping (GET /v1/models) after each: alone, then beside each flood, which another process
sends. The floods at the end have no key.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from benchmarks.attackers.connections import Stranger, post
from benchmarks.attackers.floods import FLOODS
from benchmarks.chaos_app import App, Size, started
from benchmarks.private_ray import HOST
from benchmarks.siege_app import KEYS, authorization
from deployments.config.tenants import hash_key

QUIET, FLOODING = authorization("honest"), authorization("hostile")
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What does len do?"}],
    "max_tokens": 16,
    "ignore_eos": True,
}
LONG: dict[str, Any] = {"model": "demo", "max_tokens": 300, "ignore_eos": True, "temperature": 1}
LARGE_TEXT = "word " * 200_000
CONNECTIONS = 500
FLOOD_BYTES = 2**30
"""Bytes that a flood of HTTP sends over all connections, if the server takes them."""
SETTLE_S = 120.0
MIB = 2**20
Flood = Callable[[int], Coroutine[Any, Any, None]]


async def _batches(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", headers=FLOODING, timeout=600) as client:
        for number in range(4):
            body = {**LONG, "messages": [{"role": "user", "content": f"Tell story {number}."}]}
            request = {"method": "POST", "url": "/v1/chat/completions", "body": body}
            lines = "\n".join(json.dumps({"custom_id": str(line), **request}) for line in range(400))
            files = {"file": ("requests.jsonl", lines)}
            uploaded = (await client.post("/v1/files", data={"purpose": "batch"}, files=files)).json()
            batch = {"input_file_id": uploaded["id"], "endpoint": request["url"], "completion_window": "24h"}
            (await client.post("/v1/batches", json=batch)).raise_for_status()
    await asyncio.Event().wait()


async def _chats(port: int) -> None:
    limits = httpx.Limits(max_connections=None)
    url = f"http://{HOST}:{port}"
    async with httpx.AsyncClient(base_url=url, headers=FLOODING, timeout=600, limits=limits) as client:

        async def ask_again_and_again(number: int) -> None:
            while True:
                body = {**LONG, "messages": [{"role": "user", "content": f"Tell story {number}."}]}
                await client.post("/v1/chat/completions", json=body)

        await asyncio.gather(*map(ask_again_and_again, range(400)))


async def _answers(port: int) -> None:
    prompts = [f"def f{number}(" for number in range(64)]
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", headers=FLOODING, timeout=600) as client:
        while True:
            (await client.post("/v1/completions", json={**LONG, "prompt": prompts, "n": 16})).raise_for_status()


async def _scored(port: int) -> None:
    words = ("def", "return", "class", "import", "list", "dict", "self", "value")
    prompts = [" ".join(random.Random(number).choices(words, k=1800)) for number in range(8)]
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", headers=FLOODING, timeout=600) as client:
        for number in itertools.count():
            body = {"model": "demo", "max_tokens": 1, "prompt_logprobs": 5}
            body["prompt"] = [f"{number} {prompt}" for prompt in prompts]
            (await client.post("/v1/completions", json=body)).raise_for_status()


async def _unread(port: int) -> None:
    data = post("/tokenize", {"prompt": LARGE_TEXT}, connection="close")
    await _on_each(100, port, data, 0)


async def _half_sent(port: int) -> None:
    await _on_each(1000, port, post("/v1/completions", {**LONG, "prompt": "a"})[:-1], 0)


async def _http(kind: str, port: int) -> None:
    begin, repeat = FLOODS[kind]
    times = FLOOD_BYTES // CONNECTIONS // len(repeat)
    while True:
        await _on_each(CONNECTIONS, port, begin, times, repeat)


async def _on_each(count: int, port: int, begin: bytes, times: int, repeat: bytes = b"") -> None:
    """Send on many connections at once, and read nothing; without a repetition, keep them until they are ended."""

    async def send() -> None:
        try:
            async with Stranger(HOST, port) as stranger:
                stranger.shrink()
                takes_more = not begin or await stranger.send(begin)
                for _ in range(times):
                    takes_more = takes_more and await asyncio.wait_for(stranger.send(repeat), 5.0)
                while not times:
                    await asyncio.sleep(60.0)
        except OSError:  # refused, reset or, as a TimeoutError, not read
            await asyncio.sleep(1.0)

    await asyncio.gather(*(send() for _ in range(count)))


BATCHES = "4 batches of 400"
KINDS: dict[str, Flood] = {
    BATCHES: _batches,
    "400 chats": _chats,
    "1,024 answers": _answers,
    "scores of 8 long prompts": _scored,
    "unread answers": _unread,
    "half-sent bodies": _half_sent,
    **{f"no key: {kind}": partial(_http, kind) for kind in FLOODS},
}


def main() -> None:
    """Measure, print a table and, with --json, write the rows."""
    options = _options()
    tenants = [{"name": who, "key_hashes": [hash_key(KEYS[who])]} for who in ("honest", "hostile")]
    with tempfile.TemporaryDirectory() as directory:
        changes = {
            "tenants": tenants,
            "admin_key_hash": hash_key(KEYS["admin"]),
            "files": {"directory": directory},
            "engine": {"kv_pages": 4096, "host_kv_gib": 0, "speculation": None},
        }
        _run(changes, options)


def _run(changes: Mapping[str, Any], options: argparse.Namespace) -> None:
    with started(Size(replicas=1), changes, authorization("admin")) as app:
        try:
            rows = _measure(app, options)
        finally:
            app.close()
    _print(rows)
    if options.json:
        options.json.write_text(json.dumps({"machine": this_machine.described(), "rows": rows}, indent=1) + "\n")


def _measure(app: App, options: argparse.Namespace) -> list[dict[str, Any]]:
    asyncio.run(_until_quiet(app))
    port = int(app.url.rpartition(":")[2])
    _ask(app, port, 20)
    rows = []
    kinds = options.only or list(KINDS)
    for kind in kinds:
        alone = _ask(app, port, options.samples)
        flood = multiprocessing.get_context("spawn").Process(target=_send, args=(kind, port), daemon=True)
        flood.start()
        try:
            time.sleep(options.wait)
            beside = _ask(app, port, options.samples)
        finally:
            flood.kill()
            flood.join()
        if kind == BATCHES:
            _cancel_batches(port)
        asyncio.run(_until_quiet(app))
        rows.append({"flood": kind, "alone": alone, "beside": beside, "mib_after": _mib(app)})
        _print(rows[-1:])
    return rows


def _send(kind: str, port: int) -> None:
    os.nice(10)  # as if it ran on another machine, as far as that goes
    asyncio.run(KINDS[kind](port))


async def _until_quiet(app: App) -> None:
    async def is_quiet() -> bool:
        return await app.is_whole() and not await app.metric("raydix_open_streams")

    if not await app.until(is_quiet, SETTLE_S):
        raise RuntimeError(f"the application is not quiet: {await app.health()}")


def _cancel_batches(port: int) -> None:
    with httpx.Client(base_url=f"http://{HOST}:{port}", headers=FLOODING, timeout=60) as client:
        for batch in client.get("/v1/batches").json()["data"]:
            client.post(f"/v1/batches/{batch['id']}/cancel")


def _mib(app: App) -> float:
    return round(max(psutil.Process(pid).memory_info().rss for pid in app.ingresses()) / MIB, 1)


def _ask(app: App, port: int, samples: int) -> dict[str, float]:
    """Return latencies in seconds: the median and the worst, of short answers and of pings."""
    client = http.client.HTTPConnection(HOST, port, timeout=300)
    answers, pings, mib = list[float](), list[float](), 0.0
    for _ in range(samples):
        answers.append(_timed(client, "POST", "/v1/chat/completions", CHAT))
        pings.append(_timed(client, "GET", "/v1/models", None))
        mib = max(mib, _mib(app))
    client.close()
    return {
        "p50_s": statistics.median(answers),
        "worst_s": max(answers),
        "ping_p50_s": statistics.median(pings),
        "worst_ping_s": max(pings),
        "most_mib": mib,
    }


def _timed(client: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None) -> float:
    data = None if body is None else json.dumps(body).encode()
    began = time.perf_counter()
    client.request(method, path, data, {"content-type": "application/json", **QUIET})
    answer = client.getresponse()
    answer.read()
    if answer.status != 200:
        raise RuntimeError(f"the quiet client got {answer.status}")
    return time.perf_counter() - began


def _print(rows: list[dict[str, Any]]) -> None:
    columns = ("alone, ms", "p50, ms", "to alone", "worst, ms", "to alone", "worst ping, ms", "grown, MiB")
    table = Table("flood", *columns)
    for row in rows:
        alone, beside = row["alone"], row["beside"]
        table.add_row(
            row["flood"],
            f"{alone['p50_s'] * 1e3:.0f}",
            f"{beside['p50_s'] * 1e3:.0f}",
            f"{beside['p50_s'] / alone['p50_s']:.1f}",
            f"{beside['worst_s'] * 1e3:.0f}",
            f"{beside['worst_s'] / alone['p50_s']:.1f}",
            f"{beside['worst_ping_s'] * 1e3:.0f}",
            f"{beside['most_mib'] - alone['most_mib']:.0f}",
        )
    Console(width=120).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=60, help="answers of the quiet tenant, alone and beside")
    parser.add_argument(
        "--wait", type=float, default=5.0, help="seconds from a flood's beginning to the first one"
    )
    parser.add_argument("--only", action="append", choices=list(KINDS), help="floods to send, in place of all")
    parser.add_argument("--json", type=Path, help="write the rows here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
