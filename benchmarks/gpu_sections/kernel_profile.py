"""Where a decode step's time goes on the device: its kernels, and the gaps in which none runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_sections.drive import drive
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.workload import Workload
from engine.engine import Engine

PROFILED_ROWS = (1, 32)
_STEPS = 8
_KERNELS = 12
"""Lines for a batch: the kernels that take the most time."""
_LAST_KERNEL = "_draw"
"""The kernel that ends a step: it chooses the tokens."""


class Ran(NamedTuple):
    """A kernel that ran, in microseconds of the device's clock."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """An average step."""

    kernels: dict[str, tuple[float, float]]
    """By name, the most time first: milliseconds and launches."""
    idle_ms: float
    """Between kernels of the step."""
    between_ms: float
    """From the last kernel of a step to the first of the next."""


def profile_of(ran: Sequence[Ran], last: str = _LAST_KERNEL) -> StepProfile | None:
    """Return the average step after the first one that ended; None when fewer than two steps ended."""
    ran = sorted(ran, key=lambda kernel: kernel.begin)
    ends = [at for at, kernel in enumerate(ran) if kernel.name == last]
    if len(ends) < 2:
        return None
    steps = [ran[first + 1 : end + 1] for first, end in pairwise(ends)]
    kernels: dict[str, tuple[float, float]] = {}
    idle = 0.0
    for step in steps:
        for name, begin, end in step:
            taken, launches = kernels.get(name, (0.0, 0.0))
            kernels[name] = taken + (end - begin) / 1e3 / len(steps), launches + 1 / len(steps)
        for before, after in pairwise(step):
            idle += max(0.0, after.begin - before.end)
    between = sum(step[0].begin - ran[first].end for first, step in zip(ends, steps, strict=False))
    ranked = dict(sorted(kernels.items(), key=lambda entry: -entry[1][0]))
    return StepProfile(ranked, idle / 1e3 / len(steps), between / 1e3 / len(steps))


def profiled_decodes(model: str, engine: Engine, work: Workload, device: torch.device) -> Iterator[Measurement]:
    """Lines of a batch each: its kernels, and its gaps. The prompts are in the cache before."""
    for rows in PROFILED_ROWS:
        prompts = [work.prompt(row, work.context) for row in range(min(rows, work.requests))]
        drive(engine, prompts, [1] * len(prompts))
        ran = _kernels_of(engine, prompts, device)
        profile = profile_of(ran)
        what = f"profile, {len(prompts)} row{'s' * (len(prompts) > 1)}"
        if profile is None:
            names = ", ".join(list(dict.fromkeys(kernel.name for kernel in ran))[:8])
            note = f"no steps found: no {_LAST_KERNEL} among {len(ran)} kernels ({names})"
            yield Measurement(f"{what}: kernels", model, note=note)
            continue
        total = profile.idle_ms + profile.between_ms + sum(taken for taken, _ in profile.kernels.values())
        for name, (taken, launches) in list(profile.kernels.items())[:_KERNELS]:
            note = f"{taken / total:.1%} of a step, {launches:.1f} launches"
            yield Measurement(f"{what}: {name[:48]}", model, ms=taken, note=note)
        for name, gap in (("gaps inside", profile.idle_ms), ("gap between steps", profile.between_ms)):
            yield Measurement(f"{what}: {name}", model, ms=gap, note=f"{gap / total:.1%} of a step")


def _kernels_of(engine: Engine, prompts: Sequence[list[int]], device: torch.device) -> list[Ran]:
    """Run decode steps under torch's profiler; on a CPU, what its operators are called stands for kernels."""
    activity = torch.profiler.ProfilerActivity
    kind = activity.CUDA if device.type == "cuda" else activity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        drive(engine, list(prompts), [_STEPS + 1] * len(prompts))
    events: Any = profiler.events()
    return [
        Ran(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == kind.name
    ]
