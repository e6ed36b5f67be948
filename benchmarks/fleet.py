"""Measure what a large fleet costs an ingress: placing, news of loads, and coming up among many replicas.

    python -m benchmarks.fleet [--replicas 256] [--connections 1100] [--json benchmarks/results/fleet.json]

Placing and news of loads: this process's own router, whose replicas are made up, as both are computed from what it
knows. A prompt has 4,096 tokens in blocks of 16. Figures are medians of processor time. The limit for a
placement at 256 replicas, and for a look at the queues, is 0.2 ms.

Coming up: an ingress's client connects to replicas that are the real ends of the wire, encrypted, in processes of
their own. They have no engines: what their caches hold is made up, 131,072 blocks each, no two alike, which is
more than an index keeps. "own" is what the ingress itself computed of the longest gap of its event loop.

Connections: as many replicas that hold nothing, and tell their loads once a second, as all are on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from msgspec import structs
from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from deployments.admission.fleet_load import FleetLoad
from deployments.client.protocol import GenerateRequest
from deployments.client.remote_engines import RemoteEngines
from deployments.config.settings import HealthSettings
from deployments.telemetry.garbage import GarbagePauses
from deployments.telemetry.loop_lag import LoopLag
from deployments.wire.messages import Generate, Load
from deployments.wire.open_files import allow_open_files
from deployments.wire.server import WireServer, WireTimings
from engine.values.sampling_params import SamplingParams
from router.addresses import ReplicaAddress
from router.fleet import Fleet
from router.placer import Placer
from router.state import RouterState

PROMPT_TOKENS, BLOCK_TOKENS = 4096, 16
CHAIN = PROMPT_TOKENS // BLOCK_TOKENS
SIZES = (4, 64, 256, 1000)
PLACEMENTS = 300
CACHE_BLOCKS = 131_072
"""Blocks of a replica with 2.1 million tokens of KV."""
NUM_PROCESSES = 2
"""Processes that the replicas of a measurement share."""
CASES: dict[str, Callable[[int, int], int]] = {
    "held nowhere": lambda number, count: 0,
    "a beginning that all hold": lambda number, count: CHAIN // 4,
    "a conversation's next turn": lambda number, count: CHAIN - 4 if number == 0 else 0,
    "each to another depth": lambda number, count: CHAIN * (number + 1) // count,
}
"""For each case, the number of a prompt's blocks that replica `number` of `count` holds."""
LOAD = Load(pages_free=100_000, pages_total=131_072, page_size=BLOCK_TOKENS, prefill_rate=5_000.0, max_running=256)
Row = dict[str, Any]


def main() -> None:
    options = _options()
    allow_open_files()
    rows = list(_measured(options))
    _print(rows)
    if options.json:
        document = {"machine": this_machine.described(), "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _measured(options: argparse.Namespace) -> Iterator[Row]:
    for count in SIZES:
        yield from placing(count)
        yield from hearing(count)
    yield from coming_up(options.replicas, CACHE_BLOCKS, WireTimings())
    yield from coming_up(options.connections, 0, WireTimings(heartbeat_s=1.0))


# --- computed from what the process knows -------------------------------------------------------------------


def placing(count: int) -> Iterable[Row]:
    """Measure placements, and looks at the queues, among so many replicas."""
    draw, state, names = random.Random(count), *_made_up(count)
    for case, depth in CASES.items():
        requests = [_request(draw, number) for number in range(PLACEMENTS)]
        for request in requests:
            chain = state.placer.block_hashes(request)
            for number, name in enumerate(names):
                if held := depth(number, count):
                    state.placer.apply_delta(name, chain[:held], [])
        prepared = [_with_hashes(state.placer, request) for request in requests]
        seconds = []
        for request in prepared:
            began = time.thread_time()
            state.placer.place(request, names)
            seconds.append(time.thread_time() - began)
            state.placer.release(request.request_id, [])
            state.fleet.release(request.request_id)
        yield _row(f"place: {case}", count, statistics.median(seconds) * 1e6, "µs", 200.0)
    view = FleetLoad(state.fleet, lambda _: 0)
    seconds = [_timed(lambda: view.queue_seconds(3)) for _ in range(PLACEMENTS)]
    yield _row("queue_seconds", count, statistics.median(seconds) * 1e6, "µs", 200.0)


def hearing(count: int) -> Iterable[Row]:
    """Measure news of one replica's load among so many."""
    state, names = _made_up(count)
    seconds = [_timed(partial(state.fleet.record_load, name, LOAD)) for name in (names * 75)[:300]]
    yield _row("news of one load", count, statistics.median(seconds) * 1e6, "µs", None)


def _made_up(count: int) -> tuple[RouterState, list[str]]:
    names = [f"replica-{number}" for number in range(count)]
    fleet = Fleet()
    state = RouterState(fleet, Placer(fleet, rng=random.Random(0)))
    fleet.update(dict.fromkeys(names))
    for name in names:
        fleet.record_load(name, LOAD)
    return state, names


def _request(draw: random.Random, number: int) -> GenerateRequest:
    ids = [draw.randrange(150_000) for _ in range(PROMPT_TOKENS)]
    return GenerateRequest(f"request-{draw.getrandbits(64)}-{number}", "m", ids, SamplingParams(seed=0))


def _with_hashes(placer: Placer, request: GenerateRequest) -> GenerateRequest:
    return structs.replace(request, block_hashes=placer.block_hashes(request))


def _timed(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


# --- real ends of the wire ----------------------------------------------------------------------------------


def coming_up(count: int, num_blocks: int, timings: WireTimings) -> Iterable[Row]:
    """Measure an ingress that starts among so many running replicas."""
    with replicas(count, num_blocks, timings) as addresses:
        yield from asyncio.run(asyncio.wait_for(_come_up(addresses, num_blocks, timings), 900))


async def _come_up(addresses: Mapping[str, ReplicaAddress], num_blocks: int, timings: WireTimings) -> list[Row]:
    fleet = Fleet()
    state = RouterState(fleet, Placer(fleet))
    health = HealthSettings(heartbeat_s=timings.heartbeat_s, lost_after_s=max(3.0, 30 * timings.heartbeat_s))
    engines = RemoteEngines(state, len(addresses), health=health)
    fleet.update(dict(addresses))
    GarbagePauses().settle()  # as an ingress does before it connects
    lag, count = LoopLag(), len(addresses)
    lag.start()
    began = time.monotonic()
    await engines.start()
    while not all(one.heartbeat_age_s is not None for one in (await engines.health()).replicas):
        await asyncio.sleep(0.1)
    rows = [_row("all replicas answer", count, time.monotonic() - began, "s", None)]
    if num_blocks:
        assert await engines.wait_for_prefixes(600)
        rows.append(_row("ready, with the hottest part of each cache", count, time.monotonic() - began, "s", None))
        while engines.num_synced < count:
            await asyncio.sleep(0.02)
        rows.append(_row("all caches are known", count, time.monotonic() - began, "s", None))
    rows.append(_row("longest gap of the event loop", count, lag.longest_s() * 1e3, "ms", None))
    rows.append(_row("longest gap of the event loop, own", count, lag.longest_own_s() * 1e3, "ms", 50.0))
    before, used = time.monotonic(), time.process_time()
    await asyncio.sleep(5)
    share = (time.process_time() - used) / (time.monotonic() - before)
    rows.append(_row("idle, of a core", count, share * 100, "%", None))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    rows.append(_row("memory of the process", count, memory, "MiB", None))
    lag.close()
    await engines.aclose()
    return rows


@contextmanager
def replicas(count: int, num_blocks: int, timings: WireTimings) -> Iterator[dict[str, ReplicaAddress]]:
    """Yield the addresses of replicas' ends of the wire, each with a cache of so many blocks."""
    spawn = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for first in range(NUM_PROCESSES):
        ours, theirs = spawn.Pipe()
        numbers = range(first, count, NUM_PROCESSES)
        process = spawn.Process(target=_serve, args=(numbers, num_blocks, timings, theirs), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(ours)
    try:
        addresses: dict[str, ReplicaAddress] = {}
        for pipe in pipes:
            addresses |= pipe.recv()
        yield addresses
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join(60)


def _serve(numbers: Sequence[int], num_blocks: int, timings: WireTimings, pipe: Connection) -> None:
    """Run the replicas of these numbers until told to end."""
    allow_open_files()
    servers = []
    for number in numbers:
        source = MadeUpCache(number, num_blocks)
        name = f"replica-{number}"
        servers.append(WireServer("127.0.0.1", name, lambda: LOAD, NoEngine(), timings, source, BLOCK_TOKENS))
        servers[-1].start()
    pipe.send(
        {
            one.replica: ReplicaAddress(one.replica, one.endpoint, one.secret, one.epoch, one.public_key)
            for one in servers
        }
    )
    pipe.recv()
    for server in servers:
        server.close()


class MadeUpCache:
    """What a cache holds, computed from a number. Nothing changes."""

    def __init__(self, number: int, num_blocks: int) -> None:
        self._number, self._num_blocks = number, num_blocks

    def drain(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return that nothing has changed."""
        return (), ()

    def drain_moves(self) -> dict[int, int]:
        """Return that nothing has moved."""
        return {}

    def tiers(self, hashes: Sequence[int]) -> bytes:
        """Return that all are on the device."""
        return b""

    def snapshot(self) -> Iterator[int]:
        """Yield hashes that no other number has, spread over all 64 bits."""
        first = self._number << 20
        return ((first + block) * 0x9E3779B97F4A7C15 & 0xFFFF_FFFF_FFFF_FFFF for block in range(self._num_blocks))


class NoEngine:
    """Takes no requests, as none are sent."""

    def on_generate(self, ingress_id: str, request: Generate) -> None:
        raise AssertionError("no request was sent")

    def on_abort(self, request_id: str) -> None:
        raise AssertionError("no request was sent")

    def on_withdrawn(self, ingress_id: str, request_id: str) -> None:
        raise AssertionError("no request was sent")


# --- output -------------------------------------------------------------------------------------------------


def _row(what: str, count: int, figure: float, unit: str, bar: float | None) -> Row:
    return {"what": what, "replicas": count, "figure": round(figure, 3), "unit": unit, "bar": bar}


def _print(rows: Sequence[Row]) -> None:
    table = Table("what", "replicas", "figure", "unit", "bar", title="a large fleet")
    for row in rows:
        bar = "" if row["bar"] is None else f"{row['bar']:g}"
        table.add_row(row["what"], f"{row['replicas']:,}", f"{row['figure']:,.1f}", row["unit"], bar)
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=256, help="whose caches a new ingress learns")
    parser.add_argument("--connections", type=int, default=1100, help="replicas that it connects to at once")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
