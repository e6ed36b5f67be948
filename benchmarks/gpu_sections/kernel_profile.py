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
_FIRST_KERNEL, _LAST_KERNEL = "_enter", "_leave"
"""The kernels that begin and end a recorded step."""


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
    """Between kernels of the step, in which none runs."""
    between_ms: float
    """The same from the last kernel of a step to the first of the next."""


def profile_of(ran: Sequence[Ran]) -> StepProfile | None:
    """Return the average step, from one begin to the next; None with fewer than two."""
    ran = sorted(ran, key=lambda kernel: kernel.begin)
    begins = [at for at, kernel in enumerate(ran) if kernel.name == _FIRST_KERNEL]
    if len(begins) < 2:
        return None
    kernels: dict[str, tuple[float, float]] = {}
    idle = between = 0.0
    share = 1 / (len(begins) - 1)
    for first, following in pairwise(begins):
        step = ran[first:following]
        for name, begin, end in step:
            taken, launches = kernels.get(name, (0.0, 0.0))
            kernels[name] = taken + (end - begin) / 1e3 * share, launches + share
        last = max((at for at, kernel in enumerate(step) if kernel.name == _LAST_KERNEL), default=len(step) - 1)
        idle += _idle_ms(step[: last + 1]) * share
        between += _idle_ms(ran[first + last : following + 1]) * share
    return StepProfile(dict(sorted(kernels.items(), key=lambda entry: -entry[1][0])), idle, between)


def _idle_ms(ran: Sequence[Ran]) -> float:
    """Milliseconds in which none runs between the first and the last; copies may run beside kernels."""
    idle, until = 0.0, ran[0].end
    for kernel in ran[1:]:
        idle += max(0.0, kernel.begin - until)
        until = max(until, kernel.end)
    return idle / 1e3


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
            note = f"no steps found: no {_FIRST_KERNEL} among {len(ran)} kernels ({names})"
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
