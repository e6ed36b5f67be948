"""Measure warm-up: the first minute of a new replica, with and without it.

    python -m benchmarks.warm_up [--seconds 60] [--json benchmarks/results/warm_up.json]

Starts the application on the embedded model with two engine replicas in a private Ray, and users whose prompts
begin with one of a few long prefixes (the n-th is drawn with weight 1/n). After a while it kills a replica. From
the moment its successor is up, it measures the successor's cache hit rate over prompt tokens, and the time to
first token of all users. The record that ingresses keep is timed too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import signal
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from rich.console import Console
from rich.table import Table

from benchmarks.private_ray import free_port, private_ray
from benchmarks.serving import Load, Sample, make_prompts, measure, percentiles
from cache import Namespace
from cache.prefix_hash import block_hashes, prefix_root
from deployments.app import build
from deployments.config.args import AppArgs
from router.fetch.hot_prefixes import HotPrefixes

BEFORE_S = 25.0
"""Seconds of load before the kill."""
USERS = 12
LOAD = Load(requests=20_000, prefixes=24, prefix_words=150, prefix_share=0.95, prompt_words=16, max_tokens=16)


def main() -> None:
    options = _options()
    arms = {}
    for name, max_seconds in (("cold", 0.0), ("warm", 30.0)):
        arms[name] = _with_ray(max_seconds, options.seconds)
        Console().print(f"{name}: {json.dumps(arms[name])}", soft_wrap=True)
    result = {"machine": _machine(options.note), "seconds": options.seconds, **arms, "record": time_record()}
    _print(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


# --- one arm


def _with_ray(max_seconds: float, seconds: float) -> dict[str, Any]:
    with private_ray(num_cpus=4):
        return asyncio.run(_arm(_start(max_seconds), seconds))


def _start(max_seconds: float) -> str:
    port = free_port()
    arguments = {
        "engine": {"model": "demo", "kv_pages": 4096, "threads": 1},
        "engines": {"count": 2, "num_cpus": 0.5},
        "ingresses": {"num_cpus": 0.5, "port": port},
        "warm_up": {"max_seconds": max_seconds, "tell_period_s": 2.0},
    }
    serve.run(build(AppArgs.model_validate(arguments)), name="raydix")
    return f"http://127.0.0.1:{port}"


async def _arm(url: str, seconds: float) -> dict[str, Any]:
    prompts = itertools.cycle(make_prompts(LOAD))
    samples: list[Sample] = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await _until(client, lambda up: len(up) == 2)
        start = time.perf_counter()

        async def user() -> None:
            while True:
                request = {"model": "demo", "prompt": next(prompts), "max_tokens": LOAD.max_tokens}
                samples.append(await measure(client, request, start))

        users = [asyncio.create_task(user()) for _ in range(USERS)]
        await asyncio.sleep(BEFORE_S)
        before = await _up(client)
        os.kill(_engine_pids()[0], signal.SIGKILL)
        killed_at = time.perf_counter()
        (new,) = await _until(client, lambda up: len(up) == 2 and len(up - before) == 1) - before
        up_at = time.perf_counter()
        await asyncio.sleep(seconds)
        for task in users:
            task.cancel()
        await asyncio.sleep(2.0)  # let the last numbers reach the hub
        page = (await client.get("/metrics")).text
    first_minute = [
        s for s in samples if up_at - start <= s.sent <= up_at - start + seconds and s.first is not None
    ]
    asked = _value(page, "raydix_prefix_cache_query_tokens_total", new)
    return {
        "new_replica_hit_rate": _value(page, "raydix_prefix_cache_hit_tokens_total", new) / max(asked, 1),
        "new_replica_prompt_tokens": asked,
        "fleet_hit_rate": sum(s.cached_tokens for s in first_minute) / sum(s.prompt_tokens for s in first_minute),
        "ttft": percentiles([s.first for s in first_minute if s.first is not None]),
        "requests": len(first_minute),
        "errors": sum(s.error is not None for s in samples),
        "back_after_s": up_at - killed_at,
        "warm_up_tokens": _value(page, "raydix_warm_up_tokens_total", new),
        "warm_up_s": _value(page, "raydix_warm_up_seconds_total", new),
    }


async def _until(client: httpx.AsyncClient, condition: Any) -> set[str]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        up = await _up(client)
        if condition(up):
            return up
        await asyncio.sleep(0.1)
    raise TimeoutError("the replicas did not come up within 120 s")


async def _up(client: httpx.AsyncClient) -> set[str]:
    """Return the replicas that take requests."""
    try:
        health = (await client.get("/health")).json()
    except (httpx.HTTPError, ValueError):
        return set()
    return {r["replica"] for r in health.get("replicas", ()) if r["is_connected"] and not r["is_draining"]}


def _engine_pids() -> list[int]:
    """Return the processes of this program's own engine replicas."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if "EngineReplica" in "".join(child.cmdline())]


def _value(page: str, name: str, replica: str) -> float:
    lines = (line for line in page.splitlines() if line.startswith(f"{name}{{") and f'"{replica}"' in line)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


# --- the record


def time_record() -> dict[str, float]:
    """Measure `HotPrefixes` in microseconds for a prompt of 32,768 tokens that shares half with another."""
    rng, namespace = random.Random(0), Namespace("m")
    begins = [array("i", rng.choices(range(30_000), k=16_384)) for _ in range(16)]
    hot, times = HotPrefixes(16), []
    for number in range(400):
        prompt = rng.choice(begins) + array("i", rng.choices(range(30_000), k=16_384))
        chain = block_hashes(prompt, prefix_root(namespace), 16)
        began = time.perf_counter()
        hot.record(namespace, prompt, chain, float(number))
        times.append((time.perf_counter() - began) * 1e6)
    began = time.perf_counter()
    hot.top(250_000, 400.0)
    top_ms = (time.perf_counter() - began) * 1e3
    return {"p50_us": statistics.median(times), "p95_us": statistics.quantiles(times, n=20)[-1], "top_ms": top_ms}


# --- reporting


def _print(result: dict[str, Any]) -> None:
    table = Table("first minute of a new replica", "cold", "warm", title_justify="left")
    rows = (
        ("hit rate of the replica", lambda arm: f"{arm['new_replica_hit_rate']:.1%}"),
        ("prompt tokens of the replica", lambda arm: f"{arm['new_replica_prompt_tokens']:.0f}"),
        ("hit rate of the service", lambda arm: f"{arm['fleet_hit_rate']:.1%}"),
        ("TTFT p50, ms", lambda arm: f"{arm['ttft']['p50'] * 1e3:.0f}"),
        ("TTFT p95, ms", lambda arm: f"{arm['ttft']['p95'] * 1e3:.0f}"),
        ("requests", lambda arm: str(arm["requests"])),
        ("errors", lambda arm: str(arm["errors"])),
        ("from the kill to its successor, s", lambda arm: f"{arm['back_after_s']:.1f}"),
        ("of which warm-up, s", lambda arm: f"{arm['warm_up_s']:.1f}"),
        ("tokens warmed up", lambda arm: f"{arm['warm_up_tokens']:.0f}"),
    )
    for name, cell in rows:
        table.add_row(name, cell(result["cold"]), cell(result["warm"]))
    console = Console()
    console.print(table)
    record = result["record"]
    console.print(
        f"recording a prompt of 32,768 tokens: p50 {record['p50_us']:.0f} µs, p95 {record['p95_us']:.0f} µs; "
        f"finding the best 250,000 tokens: {record['top_ms']:.1f} ms"
    )


def _machine(note: str) -> dict[str, Any]:
    return {"cpus": os.cpu_count(), "python": platform.python_version(), "ray": ray.__version__, "note": note}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the first minute, in seconds")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
