"""What is kept ready for placement is at every moment what a computation over all replicas would find."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.admission.fleet_load import FleetLoad
from router.candidates import Candidates, Order
from router.cost import Candidate, RouteQuery
from router.fleet import CIRCUIT_FAILURES, CIRCUIT_OPEN_S, Fleet
from router.member import ReplicaLoad
from router.policies import CostPolicy
from router.ready_candidates import DEFAULT_PREFILL_RATE
from tests.router.support.fleets import candidate, fleets, queries
from tests.router.support.plain_cost import plain_decision, plain_queue_seconds
from tests.support.examples import examples

NAMES = ["a", "b", "c", "d"]
LOADS = st.builds(
    ReplicaLoad,
    num_requests=st.integers(0, 30),
    num_own=st.integers(0, 3),
    queued_prefill_tokens=st.integers(0, 9000),
    dispatches_seen=st.integers(0, 6),
    prefill_rate=st.sampled_from([0.0, 0.0, 1000.0, 2500.5, 8000.0]),
    prefill_share=st.sampled_from([0.0, 0.25, 1.0]),
    is_draining=st.booleans(),
    is_full=st.booleans(),
    max_running=st.sampled_from([0, 8]),
    finish_rate=st.sampled_from([0.0, 2.0]),
)


@settings(deadline=None, max_examples=examples(80))
@given(prompt=queries(), fleet=fleets(), seed=st.integers(0, 99))
def test_the_cost_policy_decides_as_if_it_had_looked_at_every_replica(
    prompt: RouteQuery, fleet: list[Candidate], seed: int
) -> None:
    plain = plain_decision(prompt, fleet, random.Random(seed))
    for given_as in (fleet, Candidates.of(fleet)):
        decision = CostPolicy().decide(prompt, given_as, random.Random(seed))
        assert decision.terms == plain.terms
        assert (decision.order, decision.reason, decision.regret_tokens) == (
            plain.order,
            plain.reason if fleet else decision.reason,
            plain.regret_tokens,
        )


@pytest.mark.parametrize("holders", [0, 1, 3, 300])
def test_the_same_of_a_large_fleet(holders: int) -> None:
    draw = random.Random(holders)
    fleet = [
        candidate(f"r{number}", num_running=draw.randrange(40), queued_prefill_tokens=draw.randrange(2000))
        for number in range(300)
    ]
    for key in range(20):
        overlap = {f"r{draw.randrange(300)}": draw.choice([256, 3000]) for _ in range(holders)}
        prompt = RouteQuery(4000, overlap, key, None, 0.5)
        plain = plain_decision(prompt, fleet, random.Random(key))
        decision = CostPolicy().decide(prompt, Candidates.of(fleet), random.Random(key))
        assert decision.order == plain.order
        assert decision == plain


def test_the_rest_of_an_order_is_not_computed_for_the_first_names() -> None:
    asked = []

    def rest() -> list[str]:
        asked.append(1)
        return ["c"]

    order = Order(["a", "b"], 1, rest).followed_by(["d"])
    assert (order[0], order[1], len(order), asked) == ("a", "b", 4, [])
    assert list(order) == ["a", "b", "c", "d"]
    assert order[-1] == "d" and order[1:3] == ("b", "c") and len(asked) == 1


class FleetsLife(RuleBasedStateMachine):
    """Heartbeats, bookings, failures, joining and leaving, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fleet = Fleet(lambda: self.now)
        self.members: dict[str, ReplicaLoad] = {}
        self.lost: set[str] = set()
        self.open_until: dict[str, float] = {}
        self.booked: dict[str, dict[str, tuple[int, int]]] = {}  # replica -> request -> (number, tokens)
        self.unseen: dict[str, set[str]] = {}
        self.numbers: dict[str, int] = {}
        self.next_id = 0
        self.typical: dict[str, list[float]] = {}  # the fleet's rate at each moment since a replica's last news

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def update(self, names: set[str]) -> None:
        self.fleet.update(dict.fromkeys(names))
        self.lost &= names
        for gone in self.members.keys() - names:
            self.open_until.pop(gone, None)
            self.numbers.pop(gone, None)
            del self.booked[gone], self.unseen[gone]
        self.members = {name: load for name, load in self.members.items() if name in names}
        for name in names:
            self.members.setdefault(name, ReplicaLoad())
            self.booked.setdefault(name, {})
            self.unseen.setdefault(name, set())

    @rule(name=st.sampled_from(NAMES), load=LOADS)
    def heartbeat(self, name: str, load: ReplicaLoad) -> None:
        self.fleet.record_load(name, load)
        self.typical[name] = []
        if name in self.members:
            self.members[name] = load
            numbers = self.booked[name]
            self.unseen[name] = {one for one in self.unseen[name] if numbers[one][0] > load.dispatches_seen}

    @rule(name=st.sampled_from(NAMES), tokens=st.integers(0, 5000))
    def book(self, name: str, tokens: int) -> None:
        self.next_id += 1
        request = str(self.next_id)
        self.fleet.open(request)
        self.fleet.book(request, name, tokens)
        if name in self.members:
            number = self.numbers[name] = self.numbers.get(name, 0) + 1
            self.booked[name][request] = (number, tokens)
            self.unseen[name].add(request)

    @rule(which=st.integers(0, 20))
    def release(self, which: int) -> None:
        requests = [(name, request) for name, booked in self.booked.items() for request in booked]
        if requests:
            name, request = requests[which % len(requests)]
            self.fleet.release(request)
            del self.booked[name][request]
            self.unseen[name].discard(request)

    @rule(name=st.sampled_from(NAMES), is_lost=st.booleans())
    def lose(self, name: str, is_lost: bool) -> None:
        self.fleet.mark_lost(name, is_lost)
        if name in self.members:
            (self.lost.add if is_lost else self.lost.discard)(name)

    @rule(name=st.sampled_from(NAMES))
    def fail(self, name: str) -> None:
        self.fleet.record_call(name, is_failure=False)
        for _ in range(CIRCUIT_FAILURES):
            self.fleet.record_call(name, is_failure=True)
        if name in self.members:
            self.open_until[name] = self.now + CIRCUIT_OPEN_S

    @rule(seconds=st.sampled_from([1.0, CIRCUIT_OPEN_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def note_the_typical_rate(self) -> None:
        rates = [load.prefill_rate for load in self.members.values() if load.prefill_rate]
        for name in NAMES:
            self.typical.setdefault(name, []).append(sum(rates) / len(rates) if rates else DEFAULT_PREFILL_RATE)

    def plain(self, name: str, avoid: set[str], rate: float) -> Candidate:
        """`rate` is the one that was found. It is checked here, as it may be a little old."""
        load = self.members.get(name, ReplicaLoad())
        if load.prefill_rate:
            assert rate == load.prefill_rate
        else:
            assert any(rate == pytest.approx(typical) for typical in self.typical[name])
        unseen = sum(self.booked[name][request][1] for request in self.unseen.get(name, ()))
        is_out = load.is_draining or load.is_full or name in self.lost | avoid
        return candidate(
            name,
            queued_prefill_tokens=load.queued_prefill_tokens + unseen,
            num_running=max(0, load.num_requests - load.num_own) + len(self.booked.get(name, ())),
            prefill_rate=rate,
            pages_free=load.pages_free,
            pages_total=load.pages_total,
            is_available=not is_out and self.now >= self.open_until.get(name, 0.0),
            max_running=load.max_running,
            finish_rate=load.finish_rate,
        )

    @invariant()
    def candidates_are_as_computed_from_all(self) -> None:
        self.note_the_typical_rate()
        for names in (set(NAMES), set(self.members), set(NAMES[:2])):
            for avoid in (set[str](), {"a"}):
                found = self.fleet.candidates(names, avoid)
                rates = {one.replica: one.prefill_rate for one in found}
                expected = {name: self.plain(name, avoid, rates[name]) for name in names}
                assert {one.replica: one for one in found} == expected
                assert len(found) == len(names)
                serving = {name for name, one in expected.items() if one.is_available} or names
                assert found.serving.keys() == serving
                assert found.num_running == sum(expected[name].num_running for name in serving)

    @invariant()
    def the_wait_is_as_computed_from_all(self) -> None:
        known = {one.replica: one for one in self.fleet.candidates(set(self.members))}
        expected = plain_queue_seconds(known, 100)
        if expected is not None:
            load = FleetLoad(self.fleet, lambda request: 0)
            assert load.queue_seconds(100) == pytest.approx(expected)

    @invariant()
    def utilisation_is_the_mean_share_of_those_that_answer(self) -> None:
        shares = [load.prefill_share for name, load in self.members.items() if name not in self.lost]
        assert self.fleet.utilisation() == pytest.approx(sum(shares) / len(shares) if shares else 0.0)


TestFleetsLife = FleetsLife.TestCase
TestFleetsLife.settings = settings(deadline=None, max_examples=examples(30), stateful_step_count=25)
