"""What deferrable requests cost others, in simulated seconds."""

from __future__ import annotations

import pytest

from engine.values.plan import StepPlan
from tests.engine.support.simulated_time import SimulatedEngine

LIMITS = {"max_step_ms": 100.0, "max_step_stretch": 0.75}


def small_machine(plan: StepPlan) -> float:
    """A step of which each row takes a large part: 2 ms, 1 ms a decode and 0.2 ms a prompt token."""
    return 0.002 + 0.001 * plan.num_decodes + 0.0002 * plan.num_prefill


def large_machine(plan: StepPlan) -> float:
    """A step whose time hardly depends on its rows: 8 ms, 10 us a decode and 25 us a prompt token."""
    return 0.008 + 1e-5 * plan.num_decodes + 25e-6 * plan.num_prefill


MACHINES = pytest.mark.parametrize("machine", [small_machine, large_machine])


def flooded(machine: object, num_deferrable: int, num_prompt: int = 100) -> SimulatedEngine:
    engine = SimulatedEngine(machine, **LIMITS)  # type: ignore[arg-type]
    for _ in range(num_deferrable):
        engine.arrive(num_prompt, max_tokens=400, is_deferrable=True)
    engine.run(until=lambda: len(engine.plans) >= 30 or not num_deferrable)
    return engine


@MACHINES
@pytest.mark.parametrize("num_prompt", [10, 1000])
def test_a_request_takes_less_than_twice_as_long_among_hundreds_of_deferrable_ones(
    machine: object, num_prompt: int
) -> None:
    seconds, firsts = [], []
    for num_deferrable in (0, 600):
        engine = flooded(machine, num_deferrable)
        began = engine.now
        name = engine.arrive(num_prompt, max_tokens=100)
        engine.run(until=lambda: len(engine.token_times[name]) == 100)  # noqa: B023
        seconds.append(engine.now - began)
        firsts.append(engine.first_token(name) - began)
    assert seconds[1] < 2 * seconds[0]
    assert firsts[1] - firsts[0] < 0.11, "it waits for no more than the step in flight"


@MACHINES
def test_deferrable_requests_progress_next_to_an_endless_stream(machine: object) -> None:
    engine = SimulatedEngine(machine, **LIMITS)  # type: ignore[arg-type]
    engine.arrive(10, max_tokens=100_000)
    deferrable = [engine.arrive(50, max_tokens=50, is_deferrable=True) for _ in range(5)]
    engine.run(until=lambda: all(len(engine.token_times[name]) == 50 for name in deferrable))


@MACHINES
def test_without_other_requests_deferrable_ones_are_hardly_slower_than_normal_ones(machine: object) -> None:
    took = []
    for is_deferrable in (False, True):
        engine = SimulatedEngine(machine, **LIMITS)  # type: ignore[arg-type]
        for i in range(300):
            engine.arrive(100 + i, max_tokens=20, is_deferrable=is_deferrable)
        engine.run()
        took.append(engine.now)
    assert took[1] < 1.2 * took[0]
