"""The comparison's jobs over HTTP, to any OpenAI-compatible server: single stream, offline, shared prefix.

    python -m benchmarks.peers.http_load --url http://127.0.0.1:8000 --vocabulary 32000 [--quick] [--json FILE]

Prompts are token ids, answers are streamed. The client only notes when which bytes came and reads them when all is
over: it shares the processors with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.peers.models import FIRST_WORD
from benchmarks.peers.protocol import Job
from benchmarks.peers.workloads import FULL, QUICK, Sizes, make_jobs
from benchmarks.serving import Sample, summarize

REQUESTS = 128
"""Requests of the workload "offline", all at once."""
SINGLES = 4
"""Single streams, one after the other."""
_SHOWN = ("single", "offline", "shared prefix cold", "shared prefix warm")
_TIMEOUT_S = 1800.0

Chunk = tuple[float, bytes]
"""Arrival time and bytes of a chunk."""


def events(chunks: Iterable[Chunk]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The JSON events of a stream, each with the time of the chunk that completed it."""
    rest = b""
    for at, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            content = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if content and content != b"[DONE]":
                yield at, json.loads(content)


def read(sent: float, start: float, chunks: list[Chunk], asked: int) -> Sample:
    """What a request came to; an answer that has not as many tokens as `asked` is an error."""
    sample, last = Sample(sent=sent - start), sent
    for at, event in events(chunks):
        if event.get("error"):
            sample.error = "error in the stream"
        if any(choice.get("text") for choice in event.get("choices") or []):
            if sample.first is None:
                sample.first = at - sent
            else:
                sample.gaps.append(at - last)
            last = at
        if usage := event.get("usage"):
            sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    sample.duration = chunks[-1][0] - sent if chunks else 0.0
    if sample.error is None and sample.output_tokens != asked:
        sample.error = f"{sample.output_tokens} tokens instead of {asked}"
    return sample


async def run_job(client: aiohttp.ClientSession, model: str, job: Job) -> tuple[list[Sample], float]:
    """All requests of a job at once; their samples, and seconds until the last has ended."""
    start = time.perf_counter()

    async def ask(prompt: list[int], count: int) -> tuple[float, list[Chunk], int]:
        body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        sent, chunks = time.perf_counter(), []
        async with client.post("/v1/completions", json=body) as response:
            async for chunk in response.content.iter_any():
                chunks.append((time.perf_counter(), chunk))
        return sent, chunks, count

    told = await asyncio.gather(*(ask(*pair) for pair in zip(job.prompts, job.max_tokens, strict=True)))
    seconds = time.perf_counter() - start
    return [read(sent, start, chunks, asked) for sent, chunks, asked in told], seconds


async def run_jobs(client: aiohttp.ClientSession, model: str, jobs: list[Job]) -> tuple[list[Sample], float]:
    """Jobs one after the other; all samples, and the seconds of all."""
    told = [await run_job(client, model, job) for job in jobs]
    return [sample for samples, _ in told for sample in samples], sum(seconds for _, seconds in told)


def http_jobs(sizes: Sizes, ids: range, seed: int) -> dict[str, list[Job]]:
    """Return the jobs by name; those of one name run one after the other."""
    jobs = make_jobs(replace(sizes, requests=REQUESTS if sizes is FULL else sizes.requests), ids, seed)
    singles = [make_jobs(sizes, ids, seed + 1 + number)["single"] for number in range(SINGLES)]
    return {name: singles if name == "single" else [jobs[name]] for name in _SHOWN}


async def measure(url: str, sizes: Sizes, ids: range, seed: int = 0) -> dict[str, Any]:
    """Summaries by workload, as `benchmarks.serving.summarize` makes them: rates, and latencies in seconds."""
    # Not httpx, whose pool of 128 connections takes more processor time than the server has left.
    connections, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(_TIMEOUT_S)
    async with aiohttp.ClientSession(url, connector=connections, timeout=timeout, raise_for_status=True) as client:
        async with client.get("/v1/models") as response:
            model = (await response.json(content_type=None))["data"][0]["id"]
        await run_jobs(client, model, http_jobs(QUICK, ids, seed - 1)["offline"])  # warms it up
        asked = http_jobs(sizes, ids, seed)
        return {name: summarize(*await run_jobs(client, model, jobs)) for name, jobs in asked.items()}


def show(console: Console, title: str, found: dict[str, Any]) -> None:
    table = Table(
        "workload", "output tok/s", "TTFT p50, ms", "ITL p50, ms", "errors", title=title, title_justify="left"
    )
    for name, row in found.items():
        ttft, itl = (row["latency"][what].get("p50", 0) * 1e3 for what in ("ttft", "itl"))
        errors = ", ".join(row["errors"]) or "-"
        table.add_row(name, f"{row['output_tokens_per_second']:.1f}", f"{ttft:.1f}", f"{itl:.2f}", errors)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="an OpenAI-compatible server (%(default)s)")
    parser.add_argument("--vocabulary", type=int, required=True, help="prompts are ids below it")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives prompts that no cache holds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ids = range(FIRST_WORD, options.vocabulary - 1)
    found = asyncio.run(measure(options.url, QUICK if options.quick else FULL, ids, options.seed))
    show(Console(), options.url, found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
