"""Measure a server from outside: latency, throughput and prefix reuse under a given load.

    python benchmarks/serving.py --url http://127.0.0.1:8000 --concurrency 8 --json result.json

Works against any OpenAI-compatible server: prompts are words made here, and tokens are counted by the server's
own `usage`. A share of the prompts begins with one of a few long prefixes, as system prompts and documents do.
`--concurrency` keeps that many requests open (the load follows the server); `--rate` sends at Poisson times
whatever the server does, as its users would.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

PERCENTILES = (50, 90, 95, 99)
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]


@dataclass(frozen=True, slots=True)
class Load:
    """The prompts to send, and when. The same seed gives the same prompts at the same times."""

    requests: int = 200
    concurrency: int = 8
    """Requests kept open when there is no `rate`."""
    rate: float | None = None
    """Mean requests per second, at Poisson times."""
    prefixes: int = 4
    prefix_words: int = 300
    prefix_share: float = 0.8
    """Share of the prompts that begin with one of the prefixes; the n-th is drawn with weight 1/n."""
    prompt_words: int = 64
    max_tokens: int = 64
    ignore_eos: bool = False
    """Always generate `max_tokens`: not in OpenAI's API, but Raydix, vLLM and SGLang know it."""
    seed: int = 0


@dataclass(slots=True)
class Sample:
    """One request as the client saw it. Times are in seconds since it was sent."""

    sent: float
    """Seconds since the start of the run."""
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    """Times between chunks with text; a chunk is a token unless the server puts several into one."""
    duration: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


# --- load


def make_prompts(load: Load) -> list[str]:
    """Return prompts of random words, which differ except for the shared prefixes."""
    draw = random.Random(load.seed)
    prefixes = [_words(draw, load.prefix_words) for _ in range(load.prefixes)]
    weights = [1 / rank for rank in range(1, load.prefixes + 1)]
    prompts = []
    for _ in range(load.requests):
        shared = bool(prefixes) and draw.random() < load.prefix_share
        begin = draw.choices(prefixes, weights)[0] if shared else _words(draw, load.prefix_words)
        prompts.append(f"{begin} {_words(draw, load.prompt_words)}")
    return prompts


def _words(draw: random.Random, count: int) -> str:
    return " ".join("".join(draw.choices(_SYLLABLES, k=draw.randint(1, 3))) for _ in range(count))


def send_times(load: Load) -> list[float]:
    """Return seconds after the start at which requests are sent under `load.rate`; all 0 without one."""
    if load.rate is None:
        return [0.0] * load.requests
    draw, now, times = random.Random(load.seed + 1), 0.0, []
    for _ in range(load.requests):
        times.append(now)
        now += draw.expovariate(load.rate)
    return times


# --- measuring


async def run_load(client: httpx.AsyncClient, model: str, load: Load) -> tuple[list[Sample], float]:
    """Send the load and wait for all answers; returns samples in order of sending, and the seconds taken."""
    room = asyncio.Semaphore(load.requests if load.rate is not None else load.concurrency)
    extra = {"max_tokens": load.max_tokens} | ({"ignore_eos": True} if load.ignore_eos else {})
    start = time.perf_counter()

    async def send(prompt: str, at: float) -> Sample:
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - start)))
        async with room:
            return await measure(client, {"model": model, "prompt": prompt, **extra}, start)

    jobs = [send(prompt, at) for prompt, at in zip(make_prompts(load), send_times(load), strict=True)]
    samples = await asyncio.gather(*jobs)
    return list(samples), time.perf_counter() - start


async def measure(client: httpx.AsyncClient, request: dict[str, Any], start: float) -> Sample:
    """Send one streamed completion. Failures are part of the result, never an exception."""
    sent = time.perf_counter()
    sample = Sample(sent=sent - start)
    last = sent
    body = {**request, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                sample.error = f"HTTP {response.status_code}"
                return sample
            async for event in _events(response):
                now = time.perf_counter()
                if event.get("error"):
                    sample.error = "error in the stream"
                    return sample
                if any(choice.get("text") for choice in event.get("choices") or []):
                    if sample.first is None:
                        sample.first = now - sent
                    else:
                        sample.gaps.append(now - last)
                    last = now
                _take_usage(sample, event.get("usage") or {})
    except (httpx.HTTPError, ValueError, EOFError) as error:
        sample.error = type(error).__name__
    sample.duration = time.perf_counter() - sent
    return sample


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line[len("data: ") :])
    raise EOFError("the stream ended without [DONE]")


def _take_usage(sample: Sample, usage: dict[str, Any]) -> None:
    if usage:
        sample.prompt_tokens = usage.get("prompt_tokens") or 0
        sample.output_tokens = usage.get("completion_tokens") or 0
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


# --- reporting


def summarize(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Return rates, shares and percentiles of a run. Latencies are in seconds; failures count as errors only."""
    good = [sample for sample in samples if sample.error is None]
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error is not None:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    prompt_tokens = sum(sample.prompt_tokens for sample in good)
    output_tokens = sum(sample.output_tokens for sample in good)
    return {
        "requests": len(samples),
        "errors": errors,
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cached_share": sum(sample.cached_tokens for sample in good) / max(prompt_tokens, 1),
        "latency": {
            "ttft": percentiles([sample.first for sample in good if sample.first is not None]),
            "itl": percentiles([gap for sample in good for gap in sample.gaps]),
            "e2e": percentiles([sample.duration for sample in good]),
        },
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return mean and `PERCENTILES` by linear interpolation between closest ranks; empty for no values."""
    if not values:
        return {}
    ordered, result = sorted(values), {"mean": sum(values) / len(values)}
    for percent in PERCENTILES:
        rank = (len(ordered) - 1) * percent / 100
        below = int(rank)
        above = min(below + 1, len(ordered) - 1)
        result[f"p{percent}"] = ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
    return result


def print_report(console: Console, summary: dict[str, Any]) -> None:
    """Print the summary as two tables."""
    rates = Table(title="Serving benchmark", show_header=False, title_justify="left")
    failed = sum(summary["errors"].values())
    causes = ", ".join(f"{count} x {cause}" for cause, count in sorted(summary["errors"].items()))
    rates.add_row("requests", f"{summary['requests']} in {summary['seconds']:.1f} s")
    rates.add_row("errors", f"{failed}{f' ({causes})' if causes else ''}")
    rates.add_row("requests/s", f"{summary['requests_per_second']:.2f}")
    rates.add_row("output tokens/s", f"{summary['output_tokens_per_second']:.1f}")
    rates.add_row("prompt tokens", f"{summary['prompt_tokens']}, {summary['cached_share']:.1%} of them cached")
    console.print(rates)
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES)]
    latency = Table("latency, ms", *columns, title_justify="left")
    for name, values in summary["latency"].items():
        cells = (f"{values[column] * 1000:.1f}" if values else "-" for column in columns)
        latency.add_row(name.upper(), *cells)
    console.print(latency)


# --- command line


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the options; invalid ones end the program with a usage message."""
    default = Load()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="an OpenAI-compatible server (%(default)s)")
    parser.add_argument("--model", help="model to use (default: the server's first)")
    parser.add_argument("--requests", type=int, default=default.requests)
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency", type=int, default=default.concurrency, help="requests kept open (%(default)s)"
    )
    load.add_argument("--rate", type=float, help="send this many requests per second at Poisson times instead")
    parser.add_argument("--prefixes", type=int, default=default.prefixes, help="shared prefixes (%(default)s)")
    parser.add_argument("--prefix-tokens", type=int, default=default.prefix_words, help="their length, in words")
    parser.add_argument("--prefix-share", type=float, default=default.prefix_share, help="prompts with one")
    parser.add_argument("--prompt-tokens", type=int, default=default.prompt_words, help="own part, in words")
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens)
    parser.add_argument("--ignore-eos", action="store_true", help="always generate --max-tokens (an extension)")
    parser.add_argument("--timeout", type=float, default=300.0, help="longest silence of the server, in seconds")
    parser.add_argument("--json", type=Path, help="write settings, summary and samples here")
    parser.add_argument("--seed", type=int, default=default.seed)
    options = parser.parse_args(arguments)
    for name in ("requests", "concurrency", "max_tokens", "prompt_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.prefixes < 0 or options.prefix_tokens < 0:
        parser.error("--prefixes and --prefix-tokens must not be negative")
    if not 0 <= options.prefix_share <= 1 or (options.rate is not None and options.rate <= 0):
        parser.error("--prefix-share must be in [0, 1] and --rate above 0")
    return options


async def benchmark(options: argparse.Namespace) -> int:
    """Run and report; returns 1 when no request succeeded."""
    load = Load(
        options.requests, options.concurrency, options.rate, options.prefixes, options.prefix_tokens,
        options.prefix_share, options.prompt_tokens, options.max_tokens, options.ignore_eos, options.seed,
    )  # fmt: skip
    url = options.url.rstrip("/").removesuffix("/v1")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=options.timeout, limits=limits) as client:
        try:
            model = options.model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            print(f"{url} does not list its models ({type(error).__name__}: {error})", file=sys.stderr)
            return 1
        samples, seconds = await run_load(client, model, load)
    summary = summarize(samples, seconds)
    print_report(Console(), summary)
    if options.json is not None:
        result = {"model": model, "load": asdict(load), "summary": summary, "samples": list(map(asdict, samples))}
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0 if any(sample.error is None for sample in samples) else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(benchmark(parse_args())))
