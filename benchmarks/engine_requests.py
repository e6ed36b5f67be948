"""Measure what a request costs in the engine's process beside the model's steps, without HTTP and without Ray.

    python -m benchmarks.engine_requests [--outstanding 1 8 64] [--seconds 4] [--model demo] [--json FILE]

A real replica (wire, intake, engine, metrics) runs in a process of its own. This process talks to it over the wire
as an ingress does: it keeps N requests outstanding, each for one token of a chat of 90 tokens of which 80 are
cached. What is counted is the processor time of the replica's process per request, by thread:

    steps      in the model's steps: the forward pass and sampling, with OpenMP's threads
    prepare    making a step's batch
    engine     the rest of the engine's threads: inbox, schedule, apply, publish, metrics
    wire       the wire's thread and ZeroMQ's: receive, decode, make the request, submit, heartbeats
    other      the main thread, which does nothing here
    beside     all of them but `steps`

Garbage collections since the measurement before are counted, with the longest pause of them.

The model "none" answers at once, so that nothing but the rest is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import zmq
from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from benchmarks.null_model import NullRunner
from deployments.replica.deployment import EngineReplica
from deployments.replica.settings import ReplicaSettings
from deployments.telemetry.garbage import GarbagePauses
from deployments.wire import messages
from deployments.wire.handshake import Context, Socket
from deployments.wire.sockets import connect_dealer
from engine.program.engine import Engine, LoadedRunner
from engine.settings.config import EngineConfig
from engine.values.plan import Step, StepPlan, StepResult, StepUnderway
from engine.values.sampling_params import SamplingParams
from router.addresses import ReplicaAddress

NUM_CACHED, NUM_NEW = 80, 10
MAX_TOKEN = 1000
WARM_UP = 300
PARTS = ("steps", "prepare", "engine", "wire", "other")
THREADS = {"engine-loop": "engine", "engine-device": "engine", "wire": "wire"}
"""The part of each of Raydix's threads, by name."""
Row = dict[str, Any]
Spent = dict[str, float]


# --- the replica's process ---------------------------------------------------------------------------------


class MeteredRunner:
    """A runner that adds up the processor time of its steps."""

    def __init__(self, runner: LoadedRunner) -> None:
        self._runner = runner
        self.prepare_s = self.run_s = 0.0
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        """Everything else is the runner's."""
        return getattr(self._runner, name)

    def prepare(self, plan: StepPlan) -> Step:
        """Prepare a step of the runner."""
        began = time.thread_time()
        step = self._runner.prepare(plan)
        self.prepare_s += time.thread_time() - began

        def run() -> StepResult | StepUnderway:
            began = time.thread_time()
            try:
                return step()
            finally:
                self.run_s += time.thread_time() - began
                self.num_steps += 1

        return run


def make_engine(config: EngineConfig) -> Engine:
    """Make an engine whose runner is metered."""
    if config.model == "none":
        return Engine(config, cast(LoadedRunner, MeteredRunner(NullRunner(config.kv_pages or 0))))
    loaded = Engine.from_config(config)
    return Engine(loaded.config, cast(LoadedRunner, MeteredRunner(loaded.runner)))


def serve(config: EngineConfig, pipe: Connection) -> None:
    """Run a replica, and tell what was spent whenever it is asked, until the other end is closed."""
    engines: list[Engine] = []

    def factory(config: EngineConfig) -> Engine:
        engines.append(make_engine(config))
        return engines[0]

    garbage = GarbagePauses()
    replica = EngineReplica(
        config,
        ReplicaSettings(),
        engine_factory=factory,
        whereabouts=lambda: ("replica", "127.0.0.1"),
        is_stopping=lambda: False,
    )
    garbage.settle()
    wire = replica.wire
    pipe.send(ReplicaAddress("replica", wire.endpoint, wire.secret, wire.epoch, wire.public_key))
    while True:
        try:
            pipe.recv()
        except EOFError:
            break
        pauses = [seconds for _, seconds in garbage.drain()]
        found = spent(cast(MeteredRunner, engines[0].runner))
        pipe.send({**found, "num_pauses": len(pauses), "longest_pause": max(pauses, default=0.0)})
    replica.close()


def spent(runner: MeteredRunner) -> Spent:
    """Return the processor seconds of this process until now by part, and the number of its steps."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds: Spent = dict.fromkeys(PARTS, 0.0)
    for task in Path("/proc/self/task").iterdir():
        comm = (task / "comm").read_text()
        # Threads that are neither Python's nor ZeroMQ's are OpenMP's.
        part = "other" if int(task.name) in names else "wire" if comm.startswith("ZMQ") else "steps"
        part = THREADS.get(names.get(int(task.name), ""), part)
        seconds[part] += int((task / "schedstat").read_text().split()[0]) / 1e9
    seconds["steps"] += runner.run_s
    seconds["prepare"] += runner.prepare_s
    seconds["engine"] -= runner.run_s + runner.prepare_s
    seconds["num_steps"] = runner.num_steps
    return seconds


@contextmanager
def replica_process(config: EngineConfig) -> Iterator[tuple[Connection, ReplicaAddress]]:
    """Start a replica's process; yield a pipe to it, and its wire's address."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(config, theirs))
    process.start()
    theirs.close()
    try:
        address = pipe.recv()
        yield pipe, address
    finally:
        pipe.close()
        process.join()


# --- the client --------------------------------------------------------------------------------------------


class Client:
    """Asks a replica for tokens as an ingress does, from one thread."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._random = random.Random(0)
        self._shared = self._tokens(NUM_CACHED)
        self._sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        hello = messages.Hello(messages.WIRE_VERSION, 1, "ingress", "", {})
        self._socket.send(messages.encode(hello))

    def ask(self, num_outstanding: int, seconds: float = 0.0, at_least: int = 0) -> int:
        """Keep requests outstanding for some time, and until `at_least` were answered; return how many were."""
        for _ in range(num_outstanding):
            self._send()
        ended, live, until = 0, num_outstanding, time.perf_counter() + seconds
        while live:
            message = messages.decode_to_ingress(self._socket.recv())
            if isinstance(message, messages.NotRun | messages.Refused):
                raise SystemExit(f"the replica refused: {message.reason}")
            if not isinstance(message, messages.Tokens):
                continue
            for delta in message.deltas:
                if delta.finish_reason is None:
                    continue
                ended += 1
                if time.perf_counter() < until or ended < at_least:
                    self._send()
                else:
                    live -= 1
        return ended

    def _send(self) -> None:
        number = next(self._numbers)
        prompt = messages.pack_tokens([*self._shared, *self._tokens(NUM_NEW)])
        self._socket.send(messages.encode(messages.Generate(number, f"request-{number}", prompt, self._sampling)))

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1, MAX_TOKEN) for _ in range(count)]


def measure(config: EngineConfig, outstanding: list[int], seconds: float) -> Iterator[Row]:
    """Yield a row for each number of outstanding requests."""
    context: Context = zmq.Context()
    with replica_process(config) as (pipe, address), context, connect_dealer(context, address) as socket:
        client = Client(socket)
        client.ask(1)
        client.ask(8, at_least=WARM_UP)
        for num_outstanding in outstanding:
            before = _spent(pipe)
            began = time.perf_counter()
            count = client.ask(num_outstanding, seconds)
            elapsed = time.perf_counter() - began
            after = _spent(pipe)
            each = {part: (after[part] - before[part]) / count * 1e6 for part in PARTS}
            yield {
                "outstanding": num_outstanding,
                "per_second": count / elapsed,
                "steps_per_request": (after["num_steps"] - before["num_steps"]) / count,
                "gc_pauses": after["num_pauses"],
                "longest_gc_pause_ms": after["longest_pause"] * 1e3,
                "processor_us": {**each, "beside": sum(each.values()) - each["steps"]},
            }


def _spent(pipe: Connection) -> Spent:
    pipe.send(None)
    return cast(Spent, pipe.recv())


def show(console: Console, rows: list[Row]) -> None:
    """Print the rows as a table of microseconds of processor time per request."""
    parts = [*PARTS, "beside"]
    table = Table(
        "outstanding",
        "requests/s",
        "steps each",
        *parts,
        "GC pauses",
        "longest, ms",
        title="Processor time per request, in µs",
    )
    for row in rows:
        spent_us = [f"{row['processor_us'][part]:.0f}" for part in parts]
        steps = f"{row['steps_per_request']:.2f}"
        pauses = f"{row['gc_pauses']:.0f}", f"{row['longest_gc_pause_ms']:.2f}"
        table.add_row(str(row["outstanding"]), f"{row['per_second']:.0f}", steps, *spent_us, *pauses)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outstanding", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each number (%(default)s)")
    parser.add_argument("--model", choices=["demo", "none"], default="demo")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute a step (%(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = EngineConfig(model=options.model, threads=options.threads, kv_pages=4096)
    rows = list(measure(config, options.outstanding, options.seconds))
    show(Console(width=115), rows)
    if options.json:
        machine = this_machine.described()
        settings = {"model": options.model, "threads": options.threads}
        result = {"machine": machine, "settings": settings, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
