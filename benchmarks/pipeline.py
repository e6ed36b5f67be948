"""Measure how well the loop and the scheduler keep the stages of a pipeline busy, and what a step costs the host.

    python -m benchmarks.pipeline [--stage-ms 5 20] [--rows 32] [--seconds 3] [--json FILE]

The real engine runs on stages that are threads: each sleeps as long for every step, and uses no processor while it
does. A process with the whole model, whose steps take as long as all stages together, is the reference. A step has
the same number of rows in all cases, so there are as many requests as rows times steps in flight.

    steps     steps per second, those of the reference, and their ratio: at best the number of stages
    idle      share of time in which a stage waits for a step
    host      schedule + prepare + apply of a step, medians
    loop      processor time of the loop's thread for each step
    bubble    a prompt of b steps comes to an empty pipeline: the time until its token, beyond that of its steps in
              one stage, as a share of the latter. With p stages it is at best (p - 1) / b.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from benchmarks.null_model import NullRunner
from engine.program.engine import Engine
from engine.scheduling.stats import StepStats
from engine.settings.config import EngineConfig
from engine.values.plan import Step, StepPlan, StepResult
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta

CASES = ((2, 2), (2, 3), (4, 4), (4, 5))
"""Stages, and steps in flight."""
BURSTS = (2, 4, 16)
CHUNK = 512
NUM_PROMPT = 16
WARM_UP_S = 0.5
Row = dict[str, Any]


class StepInStages:
    """A step on its way through the stages."""

    def __init__(self, result: StepResult) -> None:
        self.done = threading.Event()
        self._result = result

    def is_done_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the last stage."""
        return self.done.wait(seconds)

    def wait(self) -> StepResult:
        """Wait for the last stage."""
        self.done.wait()
        return self._result


class StagedRunner(NullRunner):
    """Stages that each sleep `stage_s` for a step, and pass it on."""

    def __init__(self, num_pages: int, num_stages: int, stage_s: float) -> None:
        super().__init__(num_pages)
        self.num_stages = num_stages
        self.busy_s = [0.0] * num_stages
        """How long each stage has computed so far, in seconds."""
        self._stage_s = stage_s
        self._queues = [queue.SimpleQueue[StepInStages | None]() for _ in range(num_stages)]
        for stage in range(num_stages):
            threading.Thread(target=self._run, args=(stage,), name=f"stage-{stage}", daemon=True).start()

    def prepare(self, plan: StepPlan) -> Step:
        """Prepare a step; it enters the first stage when it is called."""
        num_sampled = len(plan.sampling_chunks)
        step = StepInStages(StepResult((self._token,) * num_sampled, (None,) * num_sampled))

        def enter() -> StepInStages:
            self._queues[0].put(step)
            return step

        return enter

    def close(self) -> None:
        """End the stages."""
        self._queues[0].put(None)

    def _run(self, stage: int) -> None:
        following = self._queues[stage + 1] if stage + 1 < self.num_stages else None
        while (step := self._queues[stage].get()) is not None:
            began = time.perf_counter()
            time.sleep(self._stage_s)
            self.busy_s[stage] += time.perf_counter() - began
            if following is None:
                step.done.set()
            else:
                following.put(step)
        if following is not None:
            following.put(None)


class Case:
    """An engine with some stages, the loop of which runs while the object is open."""

    def __init__(self, num_stages: int, micro_batches: int, step_s: float, num_requests: int) -> None:
        """A step takes `step_s` in all stages together."""
        config = EngineConfig(
            model="none",
            kv_pages=max(num_requests, 1) * 512,
            max_running=num_requests,
            max_step_tokens=max(CHUNK, num_requests),
            max_step_ms=None,
            max_step_stretch=None,
            pipeline_parallel_size=num_stages,
            micro_batches=micro_batches,
            stream_interval_ms=0,
        )
        num_pages = config.kv_pages or 0
        self.stages = StagedRunner(num_pages, num_stages, step_s / num_stages) if num_stages > 1 else None
        self.engine = Engine(config, self.stages or NullRunner(num_pages, step_s))
        self.steps: list[tuple[float, StepStats]] = []
        self.ended = threading.Event()

    def __enter__(self) -> Case:
        """Start the loop."""
        self.engine.loop.start(self._on_events, lambda stats: self.steps.append((time.perf_counter(), stats)))
        return self

    def __exit__(self, *error: object) -> None:
        """End it and the stages."""
        self.engine.loop.stop()
        if self.stages is not None:
            self.stages.close()

    def submit(self, name: str, num_prompt: int, max_tokens: int) -> None:
        """Send a request."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        prompt = [1 + len(name) + int(name) % 30_000, *range(1, num_prompt)]
        self.engine.loop.submit(self.engine.new_request(name, prompt, sampling))

    def processor_s(self) -> float:
        """Return the processor time of the loop's thread so far."""
        [thread] = [one for one in threading.enumerate() if one.name == "engine-loop"]
        assert thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    def _on_events(self, events: list[StreamDelta]) -> None:
        if any(event.finish_reason for event in events):
            self.ended.set()


def steady(num_stages: int, micro_batches: int, step_s: float, rows: int, seconds: float) -> Row:
    """Measure steps that only decode. A step of the whole model takes `step_s`."""
    num_requests = rows * micro_batches
    with Case(num_stages, micro_batches, step_s, num_requests) as case:
        for number in range(num_requests):
            case.submit(str(number), NUM_PROMPT, 8_000)
        time.sleep(WARM_UP_S + 20 * step_s)
        busy = list(case.stages.busy_s) if case.stages else []
        began, processor, first = time.perf_counter(), case.processor_s(), len(case.steps)
        time.sleep(seconds)
        ended, steps = time.perf_counter(), case.steps[first:]
        processor = case.processor_s() - processor
        after = list(case.stages.busy_s) if case.stages else []
    parts = [stats.stages for _, stats in steps]
    found: Row = {
        "stages": num_stages,
        "micro_batches": micro_batches,
        "rows": statistics.mean(stats.num_requests for _, stats in steps),
        "steps_per_s": len(steps) / (ended - began),
        "tokens_per_s": sum(stats.num_decode_tokens for _, stats in steps) / (ended - began),
        "schedule_us": statistics.median(part.schedule for part in parts) * 1e6,
        "prepare_us": statistics.median(part.prepare for part in parts) * 1e6,
        "apply_us": statistics.median(part.output for part in parts) * 1e6,
        "loop_us": processor / len(steps) * 1e6,
    }
    shares = [(now - then) / (ended - began) for then, now in zip(busy, after, strict=True)]
    return found | ({"idle": 1 - min(shares)} if shares else {})


def burst(num_stages: int, micro_batches: int, stage_s: float, num_steps: int) -> Row:
    """Measure a prompt of so many steps in an empty pipeline; the median of several."""
    found = []
    with Case(num_stages, micro_batches, num_stages * stage_s, 8) as case:
        for number in range(5):
            case.ended.clear()
            began = time.perf_counter()
            case.submit(str(number), CHUNK * num_steps, 1)
            case.ended.wait(60)
            found.append((time.perf_counter() - began) / (num_steps * stage_s) - 1)
    at_best = (num_stages - 1) / num_steps
    return {
        "stages": num_stages,
        "micro_batches": micro_batches,
        "steps": num_steps,
        "bubble": statistics.median(found),
        "at_best": at_best,
    }


def measure(stage_ms: float, rows: int, seconds: float) -> Iterator[Row]:
    """Yield a row for each case, with its ratio to the process that has the whole model."""
    for num_stages, micro_batches in CASES:
        step_s = num_stages * stage_ms / 1000
        whole = steady(1, 1, step_s, rows, seconds)
        found = steady(num_stages, micro_batches, step_s, rows, seconds)
        ratio = found["steps_per_s"] / whole["steps_per_s"]
        yield {"stage_ms": stage_ms, "whole": whole, **found, "ratio": ratio}


def show(console: Console, rows: list[Row], bursts: list[Row]) -> None:
    """Print the tables."""
    names = ("stage", "stages", "in flight", "steps/s", "whole", "ratio", "idle", "host, µs", "whole", "loop, µs")
    table = Table(*names, "whole")
    for row in rows:
        whole = row["whole"]
        hosts = [sum(one[f"{part}_us"] for part in ("schedule", "prepare", "apply")) for one in (row, whole)]
        table.add_row(
            f"{row['stage_ms']:g} ms",
            str(row["stages"]),
            str(row["micro_batches"]),
            f"{row['steps_per_s']:.1f}",
            f"{whole['steps_per_s']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['idle']:.1%}",
            *(f"{host:.0f}" for host in hosts),
            *(f"{one['loop_us']:.0f}" for one in (row, whole)),
        )
    console.print(table)
    table = Table("stages", "in flight", "steps", "bubble", "(p - 1) / b")
    for row in bursts:
        shares = f"{row['bubble']:.1%}", f"{row['at_best']:.1%}"
        table.add_row(str(row["stages"]), str(row["micro_batches"]), str(row["steps"]), *shares)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage-ms", type=float, nargs="+", default=[5.0, 20.0], help="time of a step in a stage")
    parser.add_argument("--rows", type=int, default=32, help="requests in each step (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each case (%(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for stage_ms in options.stage_ms for row in measure(stage_ms, options.rows, options.seconds)]
    bursts = [
        burst(num_stages, micro_batches, max(options.stage_ms) / 1000, num_steps)
        for num_stages, micro_batches in CASES
        for num_steps in BURSTS
    ]
    show(Console(width=115), rows, bursts)
    if options.json:
        settings = {"rows": options.rows, "seconds": options.seconds, "burst_stage_ms": max(options.stage_ms)}
        result = {"machine": this_machine.described(), "settings": settings, "rows": rows, "bursts": bursts}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
