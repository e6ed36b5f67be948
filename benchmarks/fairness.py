"""Measure what one tenant's flood costs another, in time to first token, with and without late binding.

    python -m benchmarks.fairness --rate 1 --flood 20 --seconds 30 [--json benchmarks/results/fairness.json]

Starts the embedded model with two tenants in a private Ray, once with `admission.ttft_target_s` as given and once
so large that nothing ever waits in the ingress. The quiet tenant sends at Poisson times; the flooding one sends
the same kind of requests `--flood` times as often. Both send regardless of what the server does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from benchmarks.private_ray import free_port, private_ray
from benchmarks.serving import Load, Sample, make_prompts, measure, percentiles, send_times
from deployments.app import build
from deployments.config.args import AppArgs
from deployments.config.tenants import hash_key

KEYS = {"quiet": "rdx-quiet-tenant", "flood": "rdx-flooding-tenant"}
NEVER_WAIT_S = 1e9
Row = dict[str, Any]


def main() -> None:
    options = _options()
    rows = []
    for is_fair in (True, False):
        target_s = options.ttft_target if is_fair else NEVER_WAIT_S
        with private_ray(num_cpus=4):
            url = _start(target_s, options)
            rows += asyncio.run(_measure(url, is_fair, options))
    _print(rows)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        machine = {**this_machine.described(), "note": options.note}
        document = {"machine": machine, "settings": settings, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _start(ttft_target_s: float, options: argparse.Namespace) -> str:
    port = free_port()
    arguments = {
        "engine": {"model": "demo", "kv_pages": 4096, "threads": 1},
        "engines": {"count": options.replicas, "num_cpus": 0.25},
        "ingresses": {"num_cpus": 0.25, "port": port},
        "admission": {"ttft_target_s": ttft_target_s, "max_wait_s": 60},
        "tenants": [{"name": name, "key_hashes": [hash_key(key)]} for name, key in KEYS.items()],
    }
    serve.run(build(AppArgs.model_validate(arguments)), name="fairness")
    url = f"http://127.0.0.1:{port}"
    while httpx.get(f"{url}/health", timeout=30).json()["status"] != "healthy":
        time.sleep(0.1)
    return url


async def _measure(url: str, is_fair: bool, options: argparse.Namespace) -> list[Row]:
    rows = []
    await _send(url, "quiet", 2.0, options, seed=7, seconds=3)  # warms up
    for phase in ("alone", "flooded"):
        jobs = [_send(url, "quiet", options.rate, options, seed=1)]
        if phase == "flooded":
            jobs.append(_send(url, "flood", options.rate * options.flood, options, seed=2))
        for tenant, samples in zip(KEYS, await asyncio.gather(*jobs), strict=False):
            rows.append({"fair": is_fair, "phase": phase, "tenant": tenant, **_summary(samples)})
    return rows


async def _send(
    url: str, tenant: str, rate: float, options: argparse.Namespace, *, seed: int, seconds: float | None = None
) -> Sequence[Sample]:
    """Send one tenant's requests at Poisson times; prompts share no prefix."""
    count = max(1, round(rate * (seconds or options.seconds)))
    load = Load(
        requests=count,
        rate=rate,
        prefixes=0,
        prefix_words=0,
        prompt_words=options.prompt_words,
        max_tokens=options.max_tokens,
        seed=seed,
    )
    start = time.perf_counter()
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, headers=headers) as client:

        async def one(prompt: str, at: float) -> Sample:
            await asyncio.sleep(max(0.0, at - (time.perf_counter() - start)))
            return await measure(client, {"model": "demo", "prompt": prompt, "max_tokens": load.max_tokens}, start)

        jobs = [one(prompt, at) for prompt, at in zip(make_prompts(load), send_times(load), strict=True)]
        return await asyncio.gather(*jobs)


def _summary(samples: Sequence[Sample]) -> Row:
    good = [sample for sample in samples if sample.error is None]
    return {
        "requests": len(samples),
        "errors": dict(Counter(sample.error for sample in samples if sample.error is not None)),
        "prompt_tokens": sum(sample.prompt_tokens for sample in good) / max(1, len(good)),
        "ttft": percentiles([sample.first for sample in good if sample.first is not None]),
    }


def _print(rows: list[Row]) -> None:
    columns = ("late binding", "tenant", "phase", "requests", "errors", "p50, ms", "p95, ms", "p95 to alone")
    table = Table(*columns, title="Time to first token", title_justify="left")
    alone = {row["fair"]: row["ttft"]["p95"] for row in rows if row["phase"] == "alone"}
    for row in rows:
        ttft = row["ttft"]
        cells = [f"{ttft[name] * 1000:.0f}" if ttft else "-" for name in ("p50", "p95")]
        ratio = f"{ttft['p95'] / alone[row['fair']]:.2f}" if ttft else "-"
        failed = sum(row["errors"].values())
        table.add_row(
            "yes" if row["fair"] else "no",
            row["tenant"],
            row["phase"],
            f"{row['requests']}",
            f"{failed}",
            *cells,
            ratio,
        )
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=float, default=1.0, help="the quiet tenant's requests per second")
    parser.add_argument("--flood", type=float, default=20.0, help="how many times as many the other one sends")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each phase")
    parser.add_argument("--prompt-words", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ttft-target", type=float, default=0.25, help="admission.ttft_target_s, in seconds")
    parser.add_argument("--json", type=Path, help="write settings and rows here")
    parser.add_argument("--note", default="", help="note about the machine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
