"""Deficit round robin: no request waits while there is room, shares follow weights, idleness earns no credit."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from deployments.admission.fair_queue import AdmissionQueueFull, FairQueue, Waiting
from deployments.config.settings import AdmissionSettings

QUANTUM = 100
SETTINGS = AdmissionSettings(quantum_tokens=QUANTUM)
BOUNDED = AdmissionSettings(
    quantum_tokens=QUANTUM,
    max_waiting=4,
    max_waiting_tokens=1000,
    max_waiting_per_tenant=2,
    max_waiting_tokens_per_tenant=100,
)
WEIGHTS = {"a": 0.5, "b": 1.0, "c": 3.0}
TENANTS = st.sampled_from([*WEIGHTS, "unknown"])
COSTS = st.integers(1, 500)


def entry(tenant: str, cost: int = 1, priority: int = 0) -> Waiting[str]:
    return Waiting(f"{tenant}-{cost}", tenant, cost, priority)


def weight(tenant: str) -> float:
    return WEIGHTS.get(tenant, 1.0)


def grant(tenant: str) -> float:
    return QUANTUM * weight(tenant) / 0.5


class Queue(RuleBasedStateMachine):
    """Events occur in any order. The model is the set of requests that wait."""

    waiting = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[str] = FairQueue(WEIGHTS, SETTINGS)
        self.inside: set[Waiting[str]] = set()
        self.num_pops, self.tokens_popped = 0, 0

    @rule(target=waiting, tenant=TENANTS, cost=COSTS, priority=st.integers(-1, 1))
    def push(self, tenant: str, cost: int, priority: int) -> Waiting[str]:
        new = entry(tenant, cost, priority)
        self.queue.push(new)
        self.inside.add(new)
        return new

    @rule()
    def pop(self) -> None:
        """The queue is work conserving, and returns the first request of the tenant's lowest priority."""
        popped = self.queue.pop()
        assert (popped is None) == (not self.inside)
        if popped is not None:
            self.inside.remove(popped)
            self.num_pops += 1
            self.tokens_popped += popped.cost
            assert all(other.priority >= popped.priority for other in self.inside if other.tenant == popped.tenant)

    @rule(gone=consumes(waiting))
    def remove(self, gone: Waiting[str]) -> None:
        if gone in self.inside:
            self.queue.remove(gone)
            self.inside.remove(gone)
        else:
            with pytest.raises(KeyError):
                self.queue.remove(gone)

    @invariant()
    def counts_are_right(self) -> None:
        queue = self.queue
        assert queue.num_waiting == len(self.inside)
        assert queue.num_tokens == sum(waiting.cost for waiting in self.inside)
        assert Counter({t: queue.waiting_of(t) for t in (*WEIGHTS, "unknown")}) == Counter(
            waiting.tenant for waiting in self.inside
        )
        # A turn sends a request or pays a quantum of debt.
        assert queue.num_turns <= self.num_pops + self.tokens_popped / QUANTUM


TestQueue = Queue.TestCase


@given(st.lists(st.tuples(st.sampled_from([*WEIGHTS]), COSTS), min_size=1, max_size=200), st.randoms())
@settings(max_examples=200)
def test_shares_follow_weights_while_tenants_wait(load: list[tuple[str, int]], draw: random.Random) -> None:
    """Until one tenant's queue is empty, shares always differ by at most a quantum and one request of each."""
    queue: FairQueue[str] = FairQueue(WEIGHTS, SETTINGS)
    tenants = {tenant for tenant, _ in load}
    for tenant, cost in load:
        queue.push(entry(tenant, cost))
    largest = {tenant: max(cost for owner, cost in load if owner == tenant) for tenant in tenants}
    sent = dict.fromkeys(tenants, 0.0)
    while all(queue.waiting_of(tenant) for tenant in tenants):
        popped = queue.pop()
        assert popped is not None
        correction = draw.choice((0, 0, 5, -popped.cost // 2))  # the request computed more or less
        queue.charge(popped.tenant, correction)
        sent[popped.tenant] += popped.cost + correction
        largest[popped.tenant] = max(largest[popped.tenant], popped.cost + correction)
        for one in tenants:
            for other in tenants:
                gap = sent[one] / grant(one) - sent[other] / grant(other)
                assert gap <= 1 + largest[one] / grant(one) + largest[other] / grant(other) + 1e-9


def test_a_tenant_that_was_idle_gets_no_credit_for_it() -> None:
    queue: FairQueue[str] = FairQueue({}, SETTINGS)
    for _ in range(1000):
        queue.push(entry("busy", 50))
    for _ in range(500):
        queue.pop()
    for _ in range(100):
        queue.push(entry("idle", 50))
    turns = Counter(popped.tenant for popped in (queue.pop() for _ in range(40)) if popped)
    assert turns == {"busy": 20, "idle": 20}


def test_leaving_and_coming_back_escapes_no_debt() -> None:
    """One large request at a time gets no more than the same tokens in a queue."""
    queue: FairQueue[str] = FairQueue({}, SETTINGS)
    for _ in range(1000):
        queue.push(entry("steady", 10))
    tokens = Counter[str]()
    for _ in range(900):
        if not queue.waiting_of("hopping"):
            queue.push(entry("hopping", 1000))
        popped = queue.pop()
        assert popped is not None
        tokens[popped.tenant] += popped.cost
    assert tokens["hopping"] <= tokens["steady"] + 1000 + QUANTUM


def test_a_large_request_holds_another_tenant_up_for_one_turn_only() -> None:
    queue: FairQueue[str] = FairQueue({}, SETTINGS)
    for _ in range(20):
        queue.push(entry("large", 100_000))
    queue.pop()
    queue.push(entry("small", 10))
    following = [queue.pop() for _ in range(2)]
    assert "small" in {popped.tenant for popped in following if popped}


def test_a_tenant_below_its_share_goes_first_but_only_once_a_round() -> None:
    queue: FairQueue[str] = FairQueue({}, SETTINGS)
    for tenant in ("x", "y", "z"):
        for _ in range(100):
            queue.push(entry(tenant, 10))
    for _ in range(35):
        queue.pop()
    queue.push(entry("sparse", 10))
    first = queue.pop()
    assert first is not None and first.tenant == "sparse"
    turns = Counter[str]()
    for _ in range(120):
        if not queue.waiting_of("sparse"):
            queue.push(entry("sparse", 10))
        popped = queue.pop()
        assert popped is not None
        turns[popped.tenant] += 1
    assert turns["sparse"] <= min(turns["x"], turns["y"], turns["z"])


def test_tokens_that_turn_out_to_be_cached_are_refunded() -> None:
    """Prompts are equal, but one tenant's are cached, so more of them are sent for the same computed tokens."""
    queue: FairQueue[str] = FairQueue({}, SETTINGS)
    for _ in range(400):
        queue.push(entry("cached", 100))
        queue.push(entry("cold", 100))
    sent = Counter[str]()
    for _ in range(220):
        popped = queue.pop()
        assert popped is not None
        sent[popped.tenant] += 1
        if popped.tenant == "cached":
            queue.charge("cached", -90)
    assert sent["cached"] == pytest.approx(10 * sent["cold"], rel=0.15)


def test_errors_name_the_owner_of_a_bound_and_a_tenants_first_request_always_fits() -> None:
    queue: FairQueue[str] = FairQueue({}, BOUNDED)
    queue.push(entry("a", 60))
    with pytest.raises(AdmissionQueueFull, match="as many of your prompt tokens are waiting as may, 100 ") as full:
        queue.push(entry("a", 60))
    assert full.value.whose == "tenant"
    queue.push(entry("a", 40))
    with pytest.raises(AdmissionQueueFull, match="as many of your requests are waiting as may, 2 "):
        queue.push(entry("a", 1))
    queue.push(entry("b", 5000))
    queue.push(entry("c", 1))
    with pytest.raises(AdmissionQueueFull, match="as many requests are waiting as may, 4 ") as full:
        queue.push(entry("c"))
    assert full.value.whose == "all"
    queue.push(entry("d"))
    queue = FairQueue({}, BOUNDED)
    for tenant, cost in (("a", 5000), ("b", 1)):
        queue.push(entry(tenant, cost))
    with pytest.raises(AdmissionQueueFull, match="as many prompt tokens are waiting as may, 1000 ") as full:
        queue.push(entry("b"))
    assert "5001" not in full.value.reason  # which is what another asked


def test_tokens_before_a_new_request_are_its_tenants_own_and_the_others_shares() -> None:
    queue: FairQueue[str] = FairQueue({"heavy": 4.0}, SETTINGS)
    assert queue.tokens_before("light", 100) == 0
    for _ in range(100):
        queue.push(entry("heavy", 100))
    assert queue.tokens_before("light", 100) == 400
    assert queue.tokens_before("heavy", 100) == 10_000
    assert queue.tokens_before("heavy", 100, priority=-1) == 0
    queue.push(entry("light", 100))
    assert queue.tokens_before("light", 100) == 100 + 800


def test_other_weights_hold_for_tenants_that_wait_already() -> None:
    queue: FairQueue[str] = FairQueue({"a": 1.0, "b": 1.0}, SETTINGS)
    for _ in range(400):
        queue.push(entry("a", QUANTUM))
        queue.push(entry("b", QUANTUM))
    queue.take_over({"a": 3.0, "b": 1.0}, SETTINGS)
    sent = Counter(popped.tenant for popped in (queue.pop() for _ in range(400)) if popped is not None)
    assert sent["a"] == pytest.approx(300, abs=4)


def test_other_bounds_refuse_the_next_request_and_not_those_that_wait() -> None:
    queue: FairQueue[str] = FairQueue({}, SETTINGS)
    for _ in range(8):
        queue.push(entry("a"))
    queue.take_over({}, BOUNDED)
    with pytest.raises(AdmissionQueueFull):
        queue.push(entry("a"))
    assert queue.num_waiting == 8
