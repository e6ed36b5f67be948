"""Measure the cost of streams that can be continued: processor time per event, and memory without a reader.

    python -m benchmarks.stream_costs [--rounds 40] [--json benchmarks/results/stream_costs.json]

Runs the embedded model behind one ingress. In each round, streams with and without ids of events are read to
their ends. The processor time of the ingress's process, over the number of events, is the cost of an event, and
the difference of the two that of an id. The figures are medians of all rounds, and the quartiles of an id's cost
say how much rounds differ. Then the outputs of many ended streams are kept in a replica's outbox, whose memory is
measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tracemalloc
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx

from benchmarks import this_machine
from benchmarks.chaos_app import App, Size, started
from deployments.config.settings import StreamSettings
from deployments.wire.messages import Generate, ResumableStream
from deployments.wire.outbox import Outbox
from deployments.wire.resumable import ResumableStreams
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta

NUM_STREAMS, NUM_TOKENS = 16, 250
WITH_IDS = {"accept": "text/event-stream"}
KEPT, RECORD_BYTES = 1000, 2000


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with started(Size(replicas=1), {"limits": {"max_chunks_per_s": None}}) as app:
        result = {"machine": this_machine.described(), "rounds": options.rounds, **costs(app, options.rounds)}
        app.close()
    result["bytes_per_kept_stream"] = memory_of_kept()
    result["kept"] = {"tokens": NUM_TOKENS, "record_bytes": RECORD_BYTES}
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def costs(app: App, rounds: int) -> dict[str, Any]:
    """Return microseconds of processor time per event without ids, and the ingress's further ones with an id."""
    asyncio.run(app.until(app.is_whole, 120))
    (ingress,), (engine,) = app.ingresses(), app.engines()
    spent: dict[str, list[tuple[float, float]]] = {"plain": [], "named": []}  # at the ingress and the engine
    for number in range(rounds + 1):
        kinds: list[tuple[str, dict[str, str]]] = [("plain", {}), ("named", WITH_IDS)]
        for kind, headers in kinds if number % 2 else reversed(kinds):
            at_ingress, at_engine = processor_ns(ingress), processor_ns(engine)
            num_events = asyncio.run(_read_all(app.url, headers))
            at_ingress, at_engine = processor_ns(ingress) - at_ingress, processor_ns(engine) - at_engine
            if number:  # the first round warms up
                spent[kind].append((at_ingress / num_events / 1000, at_engine / num_events / 1000))
    plain, in_engine = map(median, zip(*spent["plain"], strict=True))
    of_ids = [named - other for (named, _), (other, _) in zip(spent["named"], spent["plain"], strict=True)]
    lower, of_id, upper = quantiles(of_ids, n=4)
    return {
        "us_per_event": round(plain, 1),
        "us_per_event_in_engine": round(in_engine, 1),
        "us_per_id": round(of_id, 1),
        "us_per_id_quartiles": [round(lower, 1), round(upper, 1)],
        "share_of_ingress": round(of_id / plain, 4),
        "share_of_both": round(of_id / (plain + in_engine), 4),
    }


def processor_ns(pid: int) -> int:
    """Return the processor time of a process's threads, which Linux counts in nanoseconds here."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


async def _read_all(url: str, headers: dict[str, str]) -> int:
    async with httpx.AsyncClient(base_url=url, timeout=300, headers=headers) as client:
        return sum(await asyncio.gather(*(_read(client, number) for number in range(NUM_STREAMS))))


async def _read(client: httpx.AsyncClient, number: int) -> int:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"What does itertools.chain do? ({number})"}],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    num_events = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for received in response.aiter_raw():  # lines would take the client longer where there are ids
            num_events += received.count(b"\n\n")
    return num_events


def memory_of_kept() -> int:
    """Return the bytes of memory for each ended stream that a replica keeps."""
    outbox = Outbox()
    streams = ResumableStreams(outbox, StreamSettings(max_kept=KEPT), lambda request_id: None)
    tracemalloc.start()
    for number in range(KEPT):
        name = f"chatcmpl-{number:032x}"
        stream = ResumableStream(name, 0, "tenant", bytes(RECORD_BYTES))
        request = Generate(number, f"{name}-0", b"", SamplingParams(), stream=stream)
        outbox.open(request.request_id, "ingress", is_resumable=True)
        streams.open(request, stream)
        for token in range(NUM_TOKENS):
            outbox.record(StreamDelta(request.request_id, [1000 + token]), 0.0)
        outbox.record(StreamDelta(request.request_id, finish_reason="length"), 0.0)
        streams.leave(request.request_id, 0.0)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(size / KEPT)


if __name__ == "__main__":
    main()
