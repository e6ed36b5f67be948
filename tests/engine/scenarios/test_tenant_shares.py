"""Tenants share the rows and pages of an engine at every step, not only when requests are admitted."""

from __future__ import annotations

import pytest

from tests.engine.scenarios.conftest import Make

POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])


@POLICIES
def test_a_tenant_that_has_all_rows_immediately_gives_one_back(engine: Make, policy: str) -> None:
    script = engine(num_pages=400, limits={"max_running": 4, "policy": policy})
    for i in range(12):
        script.arrive([i + 1] * 9, max_tokens=30, tenant="red")
    for _ in range(4):
        script.step()
    for i in range(5):  # one after the other
        other = script.arrive([50 + i] * 9, max_tokens=3, tenant="blue")
        before = len(script.runner.plans)
        script.run(until=lambda: script.reason(other) is not None)  # noqa: B023
        assert len(script.runner.plans) - before <= 6


@POLICIES
def test_a_tenant_that_has_all_pages_immediately_gives_some_back(engine: Make, policy: str) -> None:
    script = engine(num_pages=24, limits={"policy": policy})
    for i in range(8):
        script.arrive([i + 1] * 12, max_tokens=14, tenant="red")
    for _ in range(6):
        script.step()
    other = script.arrive([50] * 16, max_tokens=3, tenant="blue")
    before = len(script.runner.plans)
    script.run(until=lambda: script.reason(other) is not None)
    assert len(script.runner.plans) - before <= 7


@POLICIES
def test_tenants_with_many_requests_have_equal_rows_and_do_not_take_them_back_and_forth(
    engine: Make, policy: str
) -> None:
    script = engine(num_pages=800, limits={"max_running": 6, "policy": policy})
    red = [script.arrive([i + 1] * 9, max_tokens=30, tenant="red") for i in range(9)]
    for _ in range(4):
        script.step()
    blue = [script.arrive([i + 50] * 9, max_tokens=30, tenant="blue") for i in range(9)]
    for _ in range(3):
        script.step()
    for _ in range(15):
        script.step()
        assert [sum(map(script.is_running, names)) for names in (red, blue)] == [3, 3]
    assert sum(request.num_preemptions for request in script.requests.values()) == 3


def test_a_tenant_takes_no_place_of_a_more_urgent_request(engine: Make) -> None:
    script = engine(num_pages=400, limits={"max_running": 3})
    urgent = [script.arrive([i + 1] * 9, max_tokens=9, tenant="red", priority=-5) for i in range(3)]
    script.step()
    script.arrive([50] * 9, max_tokens=3, tenant="blue")
    script.run(until=lambda: script.reason(urgent[0]) is not None)
    assert all(script.requests[name].num_preemptions == 0 for name in urgent)


def test_requests_of_the_only_tenant_are_not_preempted(engine: Make) -> None:
    script = engine(num_pages=400, limits={"max_running": 3})
    names = [script.arrive([i + 1] * 9, max_tokens=9, tenant="red") for i in range(9)]
    script.run()
    assert all(script.requests[name].num_preemptions == 0 for name in names)
