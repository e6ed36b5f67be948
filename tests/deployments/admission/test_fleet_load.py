"""Admission computes the engines' load from the router's state."""

from __future__ import annotations

import math

import pytest

from deployments.admission.fleet_load import FleetLoad
from deployments.client.protocol import GenerateRequest
from router.addresses import ReplicaAddress
from router.fleet import CIRCUIT_FAILURES, Fleet
from router.member import ReplicaLoad


def fleet(**loads: ReplicaLoad) -> Fleet:
    made = Fleet()
    made.update({name: ReplicaAddress(name, f"tcp://{name}", "secret") for name in loads})
    for name, load in loads.items():
        made.record_load(name, load)
    return made


def view(known: Fleet) -> FleetLoad:
    def whole(request: GenerateRequest) -> int:
        return len(request.prompt_ids)

    return FleetLoad(known, whole)


def test_the_least_busy_engine_counts() -> None:
    busy = ReplicaLoad(queued_prefill_tokens=5000, prefill_rate=1000)
    assert view(fleet(a=busy)).queue_seconds(0) == pytest.approx(5)
    assert view(fleet(a=busy, b=ReplicaLoad(prefill_rate=1000))).queue_seconds(0) == 0


def test_an_engine_that_runs_as_many_as_it_can_makes_wait_though_it_has_no_prompt() -> None:
    full = ReplicaLoad(num_requests=8, max_running=8, finish_rate=2, prefill_rate=1000)
    assert view(fleet(a=full)).queue_seconds(0) == pytest.approx(0.5)


def test_a_request_counts_for_all_on_its_way_and_then_at_its_replica() -> None:
    known = fleet(a=ReplicaLoad(prefill_rate=1000), b=ReplicaLoad(prefill_rate=1000))
    load = view(known)
    known.open("r")
    assert load.queue_seconds(400) == pytest.approx(0.2)  # spread over both
    known.book("r", "a", 400)
    assert load.queue_seconds(0) == 0  # b has nothing
    known.mark_lost("b")
    assert load.queue_seconds(0) == pytest.approx(0.4)


@pytest.mark.parametrize("why", ["silent", "failing", "draining", "gone"])
def test_an_engine_is_waited_for_while_there_is_none_if_one_is_expected(why: str) -> None:
    known = fleet(a=ReplicaLoad(failing="memory" if why == "failing" else "", is_draining=why == "draining"))
    if why == "silent":
        known.mark_lost("a")
    elif why == "gone":
        known.update({})
    for is_expected, wait_s in ((True, math.inf), (False, 0.0)):
        load = FleetLoad(known, lambda request: 1, lambda: is_expected)  # noqa: B023
        assert (load.queue_seconds(0), load.has_engines) == (wait_s, False)


def test_engines_whose_circuits_are_all_open_are_tried() -> None:
    known = fleet(a=ReplicaLoad())
    for _ in range(CIRCUIT_FAILURES):
        known.record_call("a", is_failure=True)
    load = FleetLoad(known, lambda request: 1, lambda: True)
    assert (load.queue_seconds(0), load.has_engines) == (0.0, True)


def test_full_queues_are_waited_for_and_lost_engines_are_not() -> None:
    known = fleet(a=ReplicaLoad(is_full=True))
    assert view(known).queue_seconds(0) == math.inf
    known.mark_lost("a")
    assert view(known).queue_seconds(0) == 0  # the client reports that none is up
    assert view(Fleet()).queue_seconds(0) == 0
