"""What one tenant's floods cost another, in simulated seconds, against what the same requests take alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from engine.values.plan import StepPlan
from tests.engine.support.simulated_time import SimulatedEngine


def small_machine(plan: StepPlan) -> float:
    """A step of which each row takes a large part: 2 ms, 1 ms a decode and 0.2 ms a prompt token."""
    return 0.002 + 0.001 * plan.num_decodes + 0.0002 * plan.num_prefill


def large_machine(plan: StepPlan) -> float:
    """A step whose time hardly depends on its rows: 8 ms, 10 us a decode and 25 us a prompt token."""
    return 0.008 + 1e-5 * plan.num_decodes + 25e-6 * plan.num_prefill


Machine = Callable[[StepPlan], float]


def made(machine: Machine, policy: str = "priority", num_pages: int = 20_000) -> SimulatedEngine:
    return SimulatedEngine(machine, num_pages, max_step_ms=100.0, max_step_stretch=0.75, policy=policy)


def latencies(engine: SimulatedEngine) -> list[float]:
    """Return what requests of a quiet tenant take, one after the other, some seconds after the flood began."""
    while engine.loop.has_work and engine.now < 2:
        engine.step()
    found: list[float] = []
    while len(found) < 12 or (len(found) < 40 and len(engine.scheduler.waiting)):
        began = engine.now
        name = engine.arrive(20, max_tokens=20, tenant="quiet")
        engine.run(until=lambda: len(engine.token_times[name]) == 20)  # noqa: B023
        found.append(engine.now - began)
        for _ in range(10):
            engine.step()
    return found


SMALL, LARGE = (small_machine, 1.8, 2.5), (large_machine, 1.5, 2.0)
"""A machine with the most that the median and the worst may be."""
LONG_ONES, SHORT_ONES = (400, 30, 300), (1024, 10, 64)
MANY_PAGES, FEW_PAGES = 20_000, 2_000
FLOODS = [
    ("priority", SMALL, LONG_ONES, MANY_PAGES),
    ("priority", LARGE, SHORT_ONES, FEW_PAGES),
    ("fcfs", SMALL, SHORT_ONES, FEW_PAGES),
    ("fcfs", LARGE, LONG_ONES, MANY_PAGES),
    ("fair", SMALL, LONG_ONES, FEW_PAGES),
    ("fair", LARGE, SHORT_ONES, MANY_PAGES),
]
"""All pairs of a policy, a machine, a flood and a number of pages."""


@pytest.mark.parametrize(("policy", "machine", "flood", "num_pages"), FLOODS)
def test_a_flood_of_one_tenant_costs_another_a_small_multiple(
    policy: str, machine: tuple[Machine, float, float], flood: tuple[int, int, int], num_pages: int
) -> None:
    """Without shares, the median is 42 times as long on the small machine, and the worst a thousand times. With
    few pages, requests of the flood are preempted again and again, and wait before those of the other tenant.
    """
    (step, most, worst), (num_flood, num_prompt, max_tokens) = machine, flood
    alone = statistics.median(latencies(made(step, policy)))
    engine = made(step, policy, num_pages)
    for _ in range(num_flood):
        engine.arrive(num_prompt, max_tokens=max_tokens, tenant="loud")
    with_others = latencies(engine)
    assert statistics.median(with_others) < most * alone
    assert max(with_others) < worst * alone


@pytest.mark.parametrize("machine", [small_machine, large_machine])
def test_all_streams_of_a_tenant_progress_next_to_an_endless_one_of_another(machine: Machine) -> None:
    engine = made(machine)
    engine.arrive(10, max_tokens=100_000, tenant="quiet")
    loud = [engine.arrive(10, max_tokens=20, tenant="loud") for _ in range(40)]
    engine.run(until=lambda: all(len(engine.token_times[name]) == 20 for name in loud))


@pytest.mark.parametrize("machine", [small_machine, large_machine])
def test_the_only_tenant_has_the_whole_engine_and_so_have_tenants_that_ask_alike(machine: Machine) -> None:
    took = []
    for tenants in ("a", "abcd"):
        engine = made(machine)
        for i in range(200):
            engine.arrive(50, max_tokens=40, tenant=tenants[i % len(tenants)])
        engine.run()
        took.append(engine.now)
    assert took[1] < 1.3 * took[0]
