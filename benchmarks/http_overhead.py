"""Measure the cost of HTTP: each process's time per token with one engine behind one ingress.

    python -m benchmarks.http_overhead [--label after] [--json benchmarks/results/http_overhead.json]

Starts the application in a private Ray, with `compare.py`'s Llama of 15M parameters ("llama"), with a model
that costs nothing ("none", what remains is everything around it), or with one that leaves the processor alone: its
steps take 20 ms ("sleep"), or 1.5 ms and 10 ms more with any prompts in them, as a 0.6B's take on an H100 ("gpu").
It sends

    single    one stream after the other, 128 -> 128 tokens
    burst     128 streams at once, 256 -> 64 tokens
    prefix    32 streams at once, (1024 shared + 32) -> 32 tokens, cold and then warm
    chat      one conversation after the other, of some 128 tokens in text -> 1 token

Prompts are token ids but for the chat. The client is one process more on the same processors. CPU time is that of
all threads of a process, per output token; in short loads it includes the processes' background work. Of several
rounds the best counts; `--label` names the column of results in the file, to compare two versions. With
`--http serve`, Serve's proxy is in front of the ingress.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve

from benchmarks import this_machine
from benchmarks.null_model import NullEngines
from benchmarks.peers.models import CONFIGS, FIRST_WORD, make_model, words
from benchmarks.private_ray import HOST, free_port, private_ray, start_proxy
from benchmarks.stream_client import Answer, StreamClient, all_at_once
from deployments.app import bind_engines, bind_ingress
from deployments.config.args import AppArgs
from deployments.hub.deployment import MetricsHub
from engine.program.engine import Engine
from engine.settings.config import EngineConfig

ROLES = {
    "Ingress": "ingress",
    "EngineReplica": "engine",
    "ProxyActor": "proxy",
    "HAProxyManager": "proxy",
    "haproxy": "proxy",
}
"""Parts of command lines, and the kinds of processes that have them."""
VOCABULARY = CONFIGS["llama-15m"]["vocab_size"]
STEP_S = {"none": (0.0, 0.0), "sleep": (0.02, 0.0), "gpu": (0.0015, 0.01)}
"""Seconds of a step, and how much longer it takes with prompts."""
Row = dict[str, Any]
_STREAM = {"stream": True, "ignore_eos": True, "temperature": 0}


class Load:
    """The requests. Each round has prompts of its own, so that no prompt is cached by accident."""

    def __init__(self, port: int, seed: int) -> None:
        self._port, self._draw = port, random.Random(seed)

    async def single(self) -> list[Answer]:
        """Send requests one after the other."""
        return await self._one_by_one([_completion(self._ids(128), 128) for _ in range(4)], "/v1/completions")

    async def burst(self) -> list[Answer]:
        """Send all requests at once."""
        return await self._at_once([_completion(self._ids(256), 64) for _ in range(128)])

    async def prefix(self) -> list[Answer]:
        """Send all requests at once, with a long shared prefix that is new."""
        self._shared = self._ids(1024)
        return await self.warm_prefix()

    async def warm_prefix(self) -> list[Answer]:
        """Send requests with the same prefix again."""
        return await self._at_once([_completion(self._shared + self._ids(32), 32) for _ in range(32)])

    async def chat(self) -> list[Answer]:
        """Send chats one after the other, as text."""
        bodies = []
        for _ in range(16):
            messages = [{"role": "user", "content": words(120, self._draw.randrange(20_000))}]
            bodies.append({"model": "small", "messages": messages, "max_tokens": 1, **_STREAM})
        return await self._one_by_one(bodies, "/v1/chat/completions")

    async def _one_by_one(self, bodies: list[dict[str, Any]], path: str) -> list[Answer]:
        client = await StreamClient.connect(HOST, self._port)
        try:
            return [await client.post(path, body) for body in bodies]
        finally:
            client.close()

    async def _at_once(self, bodies: list[dict[str, Any]]) -> list[Answer]:
        return await all_at_once(HOST, self._port, bodies, "/v1/completions")

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(FIRST_WORD, VOCABULARY - 1) for _ in range(count)]


NUM_TOKENS = {"single": 4 * 128, "burst": 128 * 64, "prefix": 32 * 32, "warm_prefix": 32 * 32, "chat": 16}


def _completion(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"model": "small", "prompt": prompt, "max_tokens": max_tokens, **_STREAM}


def main() -> None:
    options = _options()
    results: list[Row] = []
    with private_ray(num_cpus=4):
        port = start_proxy() if options.http == "serve" else free_port()
        for model in options.models:
            _start(model, port, options)
            results += asyncio.run(_measure(model, Load(port, options.seed), options))
            serve.delete("raydix")
    if options.json:
        _save(options, results)


def _start(model: str, port: int, options: argparse.Namespace) -> None:
    """Start the application with one replica."""
    directory = make_model("llama-15m", options.weights)
    args = AppArgs.model_validate(
        {
            "engine": {
                "model": str(directory),
                "served_name": "small",
                "kv_pages": 4096,
                "threads": options.threads,
                "dtype": options.dtype,
            },
            "engines": {"count": 1, "num_cpus": 0.25},
            "ingresses": {"count": 1, "num_cpus": 0.25, "http": options.http, "port": port},
        }
    )
    hub = serve.deployment(MetricsHub, name="MetricsHub", ray_actor_options={"num_cpus": 0}).bind(1, args.metrics)
    factory: Callable[[EngineConfig], Engine] = Engine.from_config
    if model != "llama":
        step_s, prompt_s = STEP_S[model]
        factory = NullEngines(step_s, VOCABULARY // 2, prompt_s)
    ((name, model_args),) = args.served.items()
    engines = bind_engines(args, model_args, hub, name, factory)
    serve.run(bind_ingress(args, engines, hub), name="raydix")


async def _measure(model: str, load: Load, options: argparse.Namespace) -> list[Row]:
    kinds: dict[str, Callable[[], Coroutine[Any, Any, list[Answer]]]] = {
        name: getattr(load, name) for name in NUM_TOKENS
    }
    gc.disable()
    for run in kinds.values():
        await run()
    rounds: dict[str, list[Row]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, run in kinds.items():
            rounds[name].append(await _round(name, run))
    rows = []
    for name, each in rounds.items():
        row = {key: pick([one[key] for one in each]) for key, pick in _PICK.items()}
        rows.append({"model": model, "load": name, **row})
        print(json.dumps(rows[-1]), flush=True)
    return rows


async def _round(name: str, run: Callable[[], Coroutine[Any, Any, list[Answer]]]) -> Row:
    await asyncio.sleep(0.3)
    before, began = _cpu_seconds(), time.perf_counter()
    answers = await run()
    seconds, after = time.perf_counter() - began, _cpu_seconds()
    num_tokens = NUM_TOKENS[name]
    events = sum(answer.num_events for answer in answers)
    arrivals = sum(len(answer.arrivals) for answer in answers)
    return {
        "tokens_per_second": num_tokens / seconds,
        "ttft_ms": statistics.median(answer.ttft for answer in answers) * 1e3,
        "itl_ms": statistics.median([gap for answer in answers for gap in answer.gaps] or [0.0]) * 1e3,
        "tokens_per_event": num_tokens / events,
        "events_per_arrival": events / arrivals,
        "cpu_us_per_token": {
            role: (after[role] - before.get(role, 0.0)) / num_tokens * 1e6 for role in sorted(after)
        },
    }


def _least(values: list[dict[str, float]]) -> dict[str, float]:
    return {role: round(min(value[role] for value in values), 1) for role in values[0]}


def _rounded(pick: Callable[[list[float]], float]) -> Callable[[list[float]], float]:
    return lambda values: round(pick(values), 2)


_PICK: dict[str, Callable[[Any], Any]] = {
    "tokens_per_second": _rounded(max),
    "ttft_ms": _rounded(min),
    "itl_ms": _rounded(min),
    "tokens_per_event": _rounded(statistics.median),
    "events_per_arrival": _rounded(statistics.median),
    "cpu_us_per_token": _least,
}
"""Function that combines the values of several rounds, by figure."""


def _cpu_seconds() -> defaultdict[str, float]:
    """Return the CPU time so far of each kind of process: ours, and all others that Ray runs."""
    own = os.times()
    seconds: defaultdict[str, float] = defaultdict(float, client=own.user + own.system)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times, line = process.cpu_times(), " ".join(process.cmdline())
            role = next((role for part, role in ROLES.items() if part in line), "ray")
            seconds[role] += times.user + times.system
    return seconds


def _save(options: argparse.Namespace, results: list[Row]) -> None:
    """Write the results beside the file's other columns."""
    found = json.loads(options.json.read_text()) if options.json.exists() else {}
    found["machine"] = {**this_machine.described(), "ray": ray.__version__}
    environment = {name: value for name, value in os.environ.items() if name.startswith("RAY_SERVE_")}
    found.setdefault("results", {})[options.label] = {
        "threads": options.threads,
        "environment": environment,
        "note": options.note,
        "rows": results,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["llama", *STEP_S], default=["llama", "none"])
    parser.add_argument(
        "--http", choices=["direct", "serve"], default="direct", help="ingresses.http (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="dtype of the engine (%(default)s)")
    parser.add_argument("--label", default="after", help="column of the results (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the results here, beside columns of other labels")
    parser.add_argument("--note", default="", help="what else the machine was doing")
    parser.add_argument("--seed", type=int, default=0)
    weights = Path.home() / ".cache" / "raydix-bench"
    parser.add_argument("--weights", type=Path, default=weights, help="for the model (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
