"""The router's state and decisions as an ingress's metrics."""

from __future__ import annotations

import random
from collections.abc import Sequence

from deployments.ingress.metrics import IngressMetrics
from monitoring.metrics import Metrics
from router.cost import Candidate, RouteQuery
from router.fleet import Fleet
from router.placer import Placer, PlacerSettings
from router.policies import Decision, Split
from tests.router.support.fleets import Prompt
from tests.support.metric_values import observations_of


class Connections:
    num_streams = 4

    def index_lag(self) -> float:
        return 0.7

    def wire_counts(self) -> dict[str, int]:
        return {"gaps": 3}


def test_an_ingresss_routing_becomes_its_metrics() -> None:
    metrics, fleet = Metrics("m", "i", "ingress"), Fleet()
    fleet.update({"a": None, "b": None})
    fleet.mark_lost("b")
    placer = Placer(fleet)
    routing = IngressMetrics(metrics, placer, fleet)
    for number in range(3):
        fleet.open(f"r{number}")
        placer.place(Prompt(f"r{number}", list(range(64))), fleet.names())
    placer.apply_delta("a", [1, 2, 3, 4], [])
    routing.collect(Connections(), num_expected=2)
    values, counts = observations_of(metrics)
    assert counts["router_decision_seconds"] == sum(values["router_decisions_total"].values()) == 3
    states = ("available", "draining", "lost", "failing", "circuit_open")
    assert values["router_replicas"] == {(state,): int(state in ("available", "lost")) for state in states}
    assert values["replicas_expected"] == {(): 2}
    assert values["router_index_lag_seconds"] == {(): 0.7}
    assert values["router_index_blocks"] == {(): 4} and values["router_index_capacity_blocks"] == {(): 4_000_000}
    assert (values["open_streams"], values["router_open_requests"]) == ({(): 4}, {(): 3})
    assert values["wire_dropped_messages_total"]["gaps",] == 3
    routing.collect(None, num_expected=0)
    assert observations_of(metrics)[0]["replicas_expected"] == {(): 0}


class Mine:
    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        split = Split(replicas)
        return split.decision([candidate.replica for candidate in split.serving], "rule", "mine", query)


def test_a_policy_of_ones_own_is_one_label_whatever_its_name() -> None:
    metrics, fleet = Metrics("m", "i", "ingress"), Fleet()
    fleet.update({"a": None, "b": None})
    placer = Placer(fleet, PlacerSettings(policy=f"{__name__}:Mine"))
    fleet.open("r")
    placer.place(Prompt("r", list(range(64))), fleet.names())
    IngressMetrics(metrics, placer, fleet).collect(None, num_expected=2)
    assert observations_of(metrics)[0]["router_decisions_total"]["custom", "rule"] == 1
