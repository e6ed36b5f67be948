"""What a step costs around the model: scheduling, applying and reporting, with a model that costs nothing.

    python -m benchmarks.host_cost [--requests 1 32 256] [--json FILE]

`EngineLoop.step` decodes N requests at once; the model answers at once. Microseconds per step: the median is what
a step costs, the 99th percentile what comes along now and then (snapshots of the load, new pages).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

from benchmarks.null_model import NullRunner
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling_params import SamplingParams

NUM_PROMPT = 100
WARM_UP = 64


def step_seconds(num_requests: int, num_steps: int) -> list[float]:
    """Durations of `num_steps` steps that decode `num_requests` requests each."""
    config = EngineConfig(model="none", kv_pages=65_536, max_running=num_requests, max_waiting=num_requests)
    engine = Engine(config, NullRunner())
    for number in range(num_requests):
        sampling = SamplingParams(max_tokens=num_steps + 1000, ignore_eos=True)
        engine.loop.submit(engine.new_request(str(number), [number + 1, *range(NUM_PROMPT - 1)], sampling))
    while engine.loop.load().num_running < num_requests:
        engine.loop.step()
    for _ in range(WARM_UP):
        engine.loop.step()
    seconds = []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.loop.step()
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for num_requests in options.requests:
        micros = sorted(second * 1e6 for second in step_seconds(num_requests, options.steps))
        results[num_requests] = {
            "p50_us": round(statistics.median(micros), 1),
            "p99_us": round(micros[int(0.99 * len(micros))], 1),
            "best_us": round(micros[0], 1),
        }
        print(f"{num_requests:5d} requests: {results[num_requests]}")
    if options.json:
        machine = {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()}
        report = {"machine": machine, "microseconds_per_step": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
