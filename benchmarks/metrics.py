"""Measure the cost of metrics: an engine's step with and without them, a token in the ingress, and the hub.

    python -m benchmarks.metrics [--steps 600] [--json benchmarks/results/metrics.json]

Engines with 256 running requests take steps that only decode; every few steps the metrics are switched on or off,
so that both arms see the same machine. The null model's steps are all overhead, the embedded model's are those of
a real model (one thread). Times are lower deciles, because other work on the machine only adds. The calls
themselves are timed too, as they cost less than the embedded model's steps vary. The hub is timed with 64 engine
replicas and 4 ingresses that have counted in every metric.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.null_model import NullRunner
from deployments.api.record.request_metrics import RequestMetrics
from deployments.api.record.request_record import RequestRecord
from deployments.replica.metrics import EngineMetrics
from engine.program.engine import Engine
from engine.runner.stage_clock import StageClock
from engine.scheduling.stats import StepStats
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from monitoring.hub import Hub
from monitoring.metric_table import METRICS, Part
from monitoring.metrics import Metrics

RUNNING = 256
BLOCK = 6
"""Steps between switching the metrics on or off; the first of each block is not counted."""
REPLICAS, INGRESSES = 64, 4


class Arms:
    """The callbacks of an engine's loop, which use the metrics in every other block of steps."""

    def __init__(self, num_steps: int) -> None:
        self.metrics = Metrics("m", "r", "engine")
        self._engine = EngineMetrics(self.metrics)
        self._num_steps, self._is_on = num_steps, False
        self._last = 0.0
        self._spent = 0.0  # seconds in the calls themselves, since the last step
        self._num = 0
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.calls: list[float] = []
        self.done = threading.Event()

    def on_events(self, events: list[StreamDelta]) -> None:
        if self._is_on:
            began = time.perf_counter()
            self._engine.on_events(events)
            self._spent += time.perf_counter() - began

    def on_step(self, stats: StepStats) -> None:
        if self._is_on:
            began = time.perf_counter()
            self._engine.on_step(stats)
            self._spent += time.perf_counter() - began
        now = time.perf_counter()
        if stats.num_requests == RUNNING and stats.phase == "decode" and self._num % BLOCK > 1:
            self.seconds[self._is_on].append(now - self._last)
            if self._is_on:
                self.calls.append(self._spent)
        self._last, self._spent = now, 0.0
        self._num += stats.phase == "decode"
        if self._num % BLOCK == 0:
            self._is_on = not self._is_on
        if sum(map(len, self.seconds.values())) >= self._num_steps:
            self.done.set()


def time_steps(engine: Engine, num_steps: int) -> dict[str, Any]:
    arms = Arms(num_steps)
    sampling = SamplingParams(temperature=0, max_tokens=4 * num_steps, ignore_eos=True)
    for number in range(RUNNING):
        prompt = [5 + number % 250, *range(10, 26)]
        engine.loop.submit(engine.new_request(f"r{number}", prompt, sampling))
    engine.loop.start(arms.on_events, arms.on_step)
    arms.done.wait()
    engine.loop.stop()
    with_metrics, without = (low(arms.seconds[is_on]) for is_on in (True, False))
    calls = low(arms.calls)
    return {
        "steps": {"with": len(arms.seconds[True]), "without": len(arms.seconds[False])},
        "step_ms": {"with": _ms(with_metrics), "without": _ms(without)},
        "calls_us_per_step": round(calls * 1e6, 1),
        "calls_share": round(calls / without, 5),
    }


def time_hub(repeats: int) -> dict[str, Any]:
    """Measure a push, a page and the memory that they take."""
    hub = Hub(num_keepers=1, patience=0.0)
    processes = [full("engine", f"engine-{n:02}") for n in range(REPLICAS)]
    processes += [full("ingress", f"ingress-{n}") for n in range(INGRESSES)]
    hub.render(0.0)
    pushes, snapshots = [], []
    for _ in range(3):
        for metrics in processes:
            snapshots.append(timed(metrics.snapshot))
            snapshot = metrics.snapshot()
            pushes.append(timed(lambda m=metrics, s=snapshot: hub.push(m.replica, s, 0.0)))  # type: ignore[misc]
    renders = [timed(lambda: hub.render(1.0)) for _ in range(repeats)]
    assert hub.checkpoint is not None
    page = hub.render(1.0)
    return {
        "replicas": REPLICAS,
        "ingresses": INGRESSES,
        "snapshot_ms": _ms(low(snapshots)),
        "snapshot_kB": round(len(processes[0].snapshot()) / 1e3, 1),
        "push_ms": _ms(low(pushes)),
        "render_ms": _ms(low(renders)),
        "page_kB": round(len(page) / 1e3),
        "series": page.count(b"\n") - page.count(b"\n#"),
        "checkpoint_kB": round(len(hub.checkpoint[1]) / 1e3),
        "busy_share": round(
            len(processes) * low(pushes) + low(renders) / 15, 4
        ),  # share of one core: a push of each process per second, a page every 15 s
    }


def time_tokens(count: int = 20_000) -> float:
    """Measure microseconds per streamed token in the ingress."""
    record = RequestRecord("completions", {})
    record.metrics = RequestMetrics(Metrics("m", "i", "ingress"), "completions")

    def some() -> None:
        for _ in range(100):
            record.received(0, 1, is_last=False)

    return low([timed(some) for _ in range(count // 100)]) / 100 * 1e6


def time_stage_clock(count: int = 20_000) -> float:
    """Measure microseconds per step that timing its stages costs on a CPU."""
    device = torch.device("cpu")

    def some() -> None:
        for _ in range(100):
            clock = StageClock(device)
            clock.begin_forward()
            clock.begin_sampling()
            clock.sample_seconds()

    return low([timed(some) for _ in range(count // 100)]) / 100 * 1e6


def full(part: Part, replica: str) -> Metrics:
    """Return the metrics of a process that has counted in every metric of its part."""
    metrics = Metrics("demo", replica, part)
    for metric in METRICS:
        labels = {name: choices[0] if choices else "some" for name, choices in metric.labels.items()}
        if metric.part == part and metric.kind == "counter":
            metrics.inc(metric.name, 12345.678, **labels)
        elif metric.part == part and metric.kind == "histogram":
            for value in (0.001, 0.03, 0.5, 700.0):
                metrics.observe(metric.name, value, 1000, **labels)
    return metrics


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def low(seconds: Sequence[float]) -> float:
    """Return the lower decile."""
    return statistics.quantiles(seconds, n=10)[0]


def main() -> None:
    options = _options()
    config = {"kv_pages": 65_536, "max_running": RUNNING, "max_step_tokens": 8192}
    null = Engine(EngineConfig(served_name="null", **config), NullRunner())  # type: ignore[arg-type]
    demo = Engine.from_config(EngineConfig(model="demo", threads=1, max_running=RUNNING, kv_pages=16_384))
    result = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "note": options.note},
        "running_requests": RUNNING,
        "null_model": time_steps(null, options.steps),
        "embedded_model": time_steps(demo, max(40, options.steps // 3)),
        "stage_clock_us_per_step": round(time_stage_clock(), 2),
        "ingress_us_per_token": round(time_tokens(), 2),
        "hub": time_hub(options.repeats),
    }
    Console().print_json(json.dumps(result))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600, help="of the null model; the embedded one takes a third")
    parser.add_argument("--repeats", type=int, default=20, help="pages rendered")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
