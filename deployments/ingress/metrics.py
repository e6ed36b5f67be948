"""Turns an ingress's view of one model's engines, and its routing decisions, into metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from monitoring.metrics import Metrics
from router.fleet import Fleet
from router.placer import Placer
from router.policies import POLICIES


class Connections(Protocol):
    """The part of the connections to the engines that is counted."""

    def wire_counts(self) -> Mapping[str, int]:
        """Number of dropped messages, by kind."""

    @property
    def num_streams(self) -> int:
        """Number of requests that have not ended."""

    def index_lag(self) -> float:
        """Age of the oldest cache update among the connected replicas, in seconds."""


class IngressMetrics:
    """Writes one model's routing metrics before each snapshot, and the time of each decision when it is made."""

    def __init__(self, metrics: Metrics, placer: Placer, fleet: Fleet) -> None:
        self._metrics, self._placer, self._fleet = metrics, placer, fleet
        placer.on_decided = metrics.series("router_decision_seconds").observe

    def collect(self, connections: Connections | None, num_expected: int) -> None:
        """Set gauges and totals. `num_expected` is the number of replicas that the configuration asks for."""
        metrics, totals = self._metrics, self._placer.totals()
        for (policy, reason), count in self._placer.counts().items():
            label = policy if policy in POLICIES else "custom"
            metrics.count_to("router_decisions_total", count, policy=label, reason=reason)
        metrics.count_to("router_errors_total", self._placer.num_errors)
        metrics.count_to("router_regret_tokens_total", totals["regret"])
        metrics.count_to("router_hit_tokens_total", totals["predicted"], kind="predicted")
        metrics.count_to("router_hit_tokens_total", totals["actual"], kind="actual")
        metrics.set("router_index_blocks", totals["blocks"])
        metrics.set("router_index_capacity_blocks", totals["max_blocks"])
        metrics.count_to("router_index_dropped_blocks_total", totals["dropped"])
        for state, replicas in self._fleet.count_by_state().items():
            metrics.set("router_replicas", replicas, state=state)
        metrics.set("replicas_expected", num_expected)
        metrics.set("router_open_requests", self._fleet.num_open)
        if connections is not None:
            metrics.set("open_streams", connections.num_streams)
            metrics.set("router_index_lag_seconds", connections.index_lag())
            for kind, dropped in connections.wire_counts().items():
                metrics.count_to("wire_dropped_messages_total", dropped, kind=kind)
