"""Where a step's time goes: its kernels, the gaps in which none runs, and the host's calls that launch them.

Of decodes several steps are averaged. Of a question after a cached prefix, whose layers are launched one by one,
all is told until its first token: long gaps and short calls say that the device waits for Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_sections.drive import drive
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.workload import Workload
from engine.program.engine import Engine

PROFILED_ROWS = (1, 32)
_STEPS = 8
_KERNELS = 12
"""Lines for a batch: the kernels that take the most time."""
_CALLS = 4
"""Lines for the host's calls that take the most time."""
_QUESTIONS = 3
"""The first computes the prefix, the second has kernels compiled, the last is profiled."""
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
    idle = between = 0.0
    share = 1 / (len(begins) - 1)
    for first, following in pairwise(begins):
        step = ran[first:following]
        last = max((at for at, kernel in enumerate(step) if kernel.name == _LAST_KERNEL), default=len(step) - 1)
        idle += _idle_ms(step[: last + 1]) * share
        between += _idle_ms(ran[first + last : following + 1]) * share
    of_steps = totals(ran[begins[0] : begins[-1]])
    kernels = {name: (taken * share, count * share) for name, (taken, count) in of_steps.items()}
    return StepProfile(kernels, idle, between)


def _idle_ms(ran: Sequence[Ran]) -> float:
    """Milliseconds in which none runs between the first and the last; copies may run beside kernels."""
    idle, until = 0.0, ran[0].end if ran else 0.0
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


def profiled_question(model: str, engine: Engine, work: Workload, device: torch.device) -> Iterator[Measurement]:
    """Lines of a short question after a cached prefix, until its first token."""
    prefix = work.prompt(3 * 10**6, work.prefix)
    *before, last = ([*prefix, *work.prompt(4 * 10**6 + at, work.suffix)] for at in range(_QUESTIONS))
    for prompt in before:
        drive(engine, [prompt], [1])
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        trace = drive(engine, [last], [1])
    ran, calls = _ran(profiler, device.type), totals(_calls(profiler))
    what, total = f"profile, question of {work.suffix} after {trace.cached[0]}", 1000 * trace.first[0]
    yield Measurement(f"{what}: first token", model, ms=total, note="it is slower while it is profiled")
    for name, (taken, count) in list(calls.items())[:_CALLS]:
        yield Measurement(f"{what}: host in {name[:40]}", model, ms=taken, note=f"{count:.0f} calls")
    for name, (taken, count) in list(totals(ran).items())[:_KERNELS]:
        note = f"{taken / total:.1%} of the time, {count:.0f} launches"
        yield Measurement(f"{what}: {name[:48]}", model, ms=taken, note=note)
    gap = _idle_ms(sorted(ran, key=lambda kernel: kernel.begin))
    yield Measurement(f"{what}: gaps inside", model, ms=gap, note=f"{gap / total:.1%} of the time")


def totals(ran: Iterable[Ran]) -> dict[str, tuple[float, int]]:
    """Return what ran by name, the most time first: milliseconds, and how often."""
    found: dict[str, tuple[float, int]] = {}
    for name, begin, end in ran:
        taken, count = found.get(name, (0.0, 0))
        found[name] = taken + (end - begin) / 1e3, count + 1
    return dict(sorted(found.items(), key=lambda entry: -entry[1][0]))


def _kernels_of(engine: Engine, prompts: Sequence[list[int]], device: torch.device) -> list[Ran]:
    """Run decode steps under torch's profiler."""
    activity = torch.profiler.ProfilerActivity
    kind = activity.CUDA if device.type == "cuda" else activity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        drive(engine, list(prompts), [_STEPS + 1] * len(prompts))
    return _ran(profiler, device.type)


def _ran(profiler: torch.profiler.profile, device_type: str) -> list[Ran]:
    """Return the kernels that ran; on a CPU, what its operators are called stands for kernels."""
    events: Any = profiler.events()
    return [
        Ran(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == device_type.upper()
    ]


def _calls(profiler: torch.profiler.profile) -> list[Ran]:
    """Return the host's calls of CUDA: of its runtime, and of its driver."""
    return [call for call in _ran(profiler, "cpu") if call.name.startswith("cu")]
