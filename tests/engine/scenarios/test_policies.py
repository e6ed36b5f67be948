"""Which request goes first, by every policy, in engines that run one at a time."""

from __future__ import annotations

import pytest

from tests.engine.scenarios.conftest import Make
from tests.engine.support.script import Script


def first_tokens(script: Script) -> list[str]:
    """All requests, in the order of their first tokens."""
    seen: dict[str, None] = {}
    while script.loop.has_work:
        seen |= dict.fromkeys(event.request_id for event in script.step() if event.token_ids)
    return list(seen)


def test_first_come_first_served_whatever_the_priorities(engine: Make) -> None:
    script = engine(num_pages=200, limits={"max_running": 1, "policy": "fcfs"})
    names = [script.arrive([i + 1] * (40 - 6 * i), max_tokens=3, priority=i) for i in range(6)]
    assert first_tokens(script) == names


def test_priorities_and_among_equals_the_order_of_arrival(engine: Make) -> None:
    script = engine(num_pages=200, limits={"max_running": 1})
    names = [script.arrive([i + 1] * 9, max_tokens=3, priority=p) for i, p in enumerate((0, 1, -2, 0, -2, 1))]
    assert first_tokens(script) == [names[i] for i in (2, 4, 0, 3, 1, 5)]


def test_tenants_take_turns_and_within_one_priorities_count(engine: Make) -> None:
    script = engine(num_pages=200, limits={"max_running": 1, "policy": "fair", "fair_quantum_tokens": 9})
    red = [script.arrive([i + 1] * 9, max_tokens=1, tenant="red", priority=-i) for i in range(3)]
    blue = [script.arrive([i + 9] * 9, max_tokens=1, tenant="blue") for i in range(3)]
    order = first_tokens(script)
    assert [name for name in order if name in red] == red[::-1]
    assert [name for name in order if name in blue] == blue
    assert [name in red for name in order] in ([True, False] * 3, [False, True] * 3)


@pytest.mark.parametrize(("tenant", "num_preemptions"), [("red", 1), ("blue", 0)])
def test_a_tenant_preempts_no_other_tenants_request(engine: Make, tenant: str, num_preemptions: int) -> None:
    script = engine(num_pages=200, limits={"max_running": 1, "policy": "fair"})
    a = script.arrive([1] * 9, max_tokens=8, tenant="red")
    script.step()
    b = script.arrive([2] * 9, max_tokens=2, tenant=tenant, priority=-9)
    script.run(until=lambda: bool(script.tokens(b)))
    assert (script.reason(a) is None) == bool(num_preemptions)
    assert script.requests[a].num_preemptions == num_preemptions


def test_a_request_that_has_waited_long_enough_goes_before_a_higher_priority(engine: Make) -> None:
    """A half-life of four steps: after eight, an older request stands before a new one two levels above it."""
    script = engine(num_pages=200, limits={"max_running": 1, "priority_half_life_s": 4.0})
    script.arrive([1] * 9, max_tokens=12, priority=-5)
    low = script.arrive([2] * 9, max_tokens=2)
    for _ in range(9):
        script.step()
    high = script.arrive([3] * 9, max_tokens=2, priority=-2)
    order = first_tokens(script)
    assert order.index(low) < order.index(high)


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
def test_no_request_overtakes_into_the_memory_that_another_one_waits_for(engine: Make, policy: str) -> None:
    """Among equals the large request is admitted next, however small the others are."""
    script = engine(num_pages=16, limits={"policy": policy})
    script.arrive([1] * 30, max_tokens=10)
    script.step()
    large = script.arrive([2] * 40, max_tokens=2)
    small = script.arrive([3] * 4, max_tokens=2)
    script.run(until=lambda: script.is_running(small) or script.reason(small) is not None)
    assert script.is_running(large) or script.reason(large) is not None
