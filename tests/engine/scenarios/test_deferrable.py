"""Requests of batches give way to all others within a step, whatever the policy and the priorities."""

from __future__ import annotations

import pytest

from tests.engine.scenarios.conftest import Make

POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])


@POLICIES
@pytest.mark.parametrize("tenant", ["red", "blue"])
def test_all_waiting_urgent_requests_get_the_rows_of_deferrable_ones_in_one_step(
    engine: Make, policy: str, tenant: str
) -> None:
    script = engine(num_pages=400, limits={"max_running": 4, "policy": policy})
    for i in range(8):
        script.arrive([i + 1] * 9, max_tokens=20, tenant="red", priority=-9, is_deferrable=True)
    for _ in range(4):
        script.step()
    urgent = [script.arrive([i + 50] * 9, max_tokens=3, tenant=tenant, priority=9) for i in range(3)]
    script.step()  # the step that was in flight when they came
    script.step()
    assert all(script.is_running(name) for name in urgent)
    before = len(script.runner.plans)
    script.run(until=lambda: all(script.reason(name) for name in urgent))
    assert len(script.runner.plans) - before <= 5


@POLICIES
def test_an_urgent_request_immediately_gets_the_pages_of_deferrable_ones(engine: Make, policy: str) -> None:
    script = engine(num_pages=24, limits={"policy": policy})
    for i in range(4):
        script.arrive([i + 1] * 12, max_tokens=12, is_deferrable=True)
    for _ in range(6):
        script.step()
    urgent = script.arrive([50] * 70, max_tokens=3)
    script.step()
    script.step()
    assert script.is_running(urgent)


@POLICIES
def test_urgent_requests_overtake_all_deferrable_ones_that_wait(engine: Make, policy: str) -> None:
    script = engine(num_pages=400, limits={"max_running": 2, "policy": policy, "priority_half_life_s": 0.5})
    deferrable = [script.arrive([i + 1] * 9, max_tokens=2, priority=-9, is_deferrable=True) for i in range(9)]
    for _ in range(3):
        script.step()
    urgent = [script.arrive([i + 50] * 9, max_tokens=2, priority=9) for i in range(6)]
    script.run(until=lambda: all(script.reason(name) for name in urgent))
    assert sum(script.reason(name) is not None for name in deferrable) <= 2


def test_a_deferrable_request_preempts_no_urgent_one(engine: Make) -> None:
    script = engine(num_pages=400, limits={"max_running": 1})
    urgent = script.arrive([1] * 9, max_tokens=9, priority=9)
    script.step()
    script.arrive([2] * 9, max_tokens=2, priority=-9, is_deferrable=True)
    script.run(until=lambda: script.reason(urgent) is not None)
    assert script.requests[urgent].num_preemptions == 0


def test_tenants_take_turns_with_their_deferrable_requests(engine: Make) -> None:
    script = engine(num_pages=400, limits={"max_running": 1, "fair_quantum_tokens": 9})
    red = [script.arrive([i + 1] * 9, max_tokens=1, tenant="red", is_deferrable=True) for i in range(9)]
    blue = [script.arrive([i + 50] * 9, max_tokens=1, tenant="blue", is_deferrable=True) for i in range(2)]
    script.run(until=lambda: all(script.reason(name) for name in blue))
    assert sum(script.reason(name) is not None for name in red) <= 4
