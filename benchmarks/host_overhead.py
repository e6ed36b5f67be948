"""Measure the host's work in a step, and how much of it the model's execution hides.

    python -m benchmarks.host_overhead [--requests 1 64 256] [--json FILE]

N requests decode at once, through the real loop, scheduler and cache. Host time is what a step needs besides the
model: schedule (which tokens, in whose pages) + prepare (the batch's indices and ids) + apply (the result). With
overlap it is spent while the previous step runs. The rest is the time from step to step less the model's:

    hidden share = 1 - (wall - model) / host

Models: "none" answers at once, so there is nothing to hide behind; "sleep" takes 5 ms and leaves the processor
alone, as a GPU does; "demo" is the embedded model, which shares the processor with the host's work. Medians of
steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import threading
import time
from pathlib import Path

from benchmarks.null_model import NullRunner
from engine.program.engine import Engine
from engine.scheduling.stats import StepStats
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta

NUM_PROMPT = 100
WARM_UP = 40
SLEEP_S = 0.005
STEPS = {"none": 1000, "sleep": 300, "demo": 60}


def make(model: str, num_requests: int, overlap: bool) -> Engine:
    config = EngineConfig(
        model="demo" if model == "demo" else "none",
        kv_pages=num_requests * 96,
        max_running=num_requests,
        max_waiting=num_requests,
        overlap=overlap,
    )
    if model == "demo":
        return Engine.from_config(config)
    return Engine(config, NullRunner(config.kv_pages or 0, SLEEP_S if model == "sleep" else 0.0))


class Watch:
    """Collects the steps in which all requests decode."""

    def __init__(self, num_requests: int, num_steps: int) -> None:
        self.steps: list[tuple[float, StepStats]] = []
        self.enough = threading.Event()
        self._num_requests, self._num_steps = num_requests, num_steps

    def on_step(self, stats: StepStats) -> None:
        if stats.num_decode_tokens == self._num_requests:
            self.steps.append((time.perf_counter(), stats))
        if len(self.steps) > WARM_UP + self._num_steps:
            self.enough.set()

    def summary(self) -> dict[str, float]:
        """Return medians in microseconds; the hidden share is of the host's time."""
        steps = self.steps[WARM_UP : WARM_UP + self._num_steps]
        ends = [at for at, _ in self.steps[WARM_UP - 1 :]]
        walls = [after - before for before, after in itertools.pairwise(ends)]
        stages = [stats.stages for _, stats in steps]
        parts = {
            "schedule": [stage.schedule for stage in stages],
            "prepare": [stage.prepare for stage in stages],
            "apply": [stage.output for stage in stages],
            "host": [stage.schedule + stage.prepare + stage.output for stage in stages],
            "model": [stage.forward + stage.sample for stage in stages],
            "wall": walls,
        }
        found = {f"{name}_us": round(statistics.median(seconds) * 1e6, 1) for name, seconds in parts.items()}
        hidden = 1 - (found["wall_us"] - found["model_us"]) / found["host_us"]
        return {**found, "hidden_share": round(hidden, 2)}


def measure(model: str, num_requests: int, overlap: bool) -> dict[str, float]:
    """Decode until enough steps were seen."""
    engine, num_steps = make(model, num_requests, overlap), STEPS[model]
    watch = Watch(num_requests, num_steps)

    def on_events(events: list[StreamDelta]) -> None:
        pass

    for number in range(num_requests):
        sampling = SamplingParams(max_tokens=num_steps + 8 * WARM_UP, ignore_eos=True, temperature=0.0)
        prompt = [number + 1, *range(1, NUM_PROMPT)]
        engine.loop.submit(engine.new_request(str(number), prompt, sampling))
    engine.loop.start(on_events, watch.on_step)
    if not watch.enough.wait(timeout=300):
        raise SystemExit(f"only {len(watch.steps)} steps of {num_requests} requests were seen in 300 s")
    engine.loop.stop()
    return watch.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--models", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for model in options.models:
        for num_requests in options.requests:
            for overlap in (False, True):
                found = measure(model, num_requests, overlap)
                results.append({"model": model, "requests": num_requests, "overlap": overlap, **found})
                print(f"{model:6s} {num_requests:4d} requests, overlap {overlap!s:5s}: {found}", flush=True)
    if options.json:
        machine = {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()}
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
