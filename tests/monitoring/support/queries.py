"""Every expression that dashboards and alerts send to Prometheus, in its final form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.dashboard_preview.data import EVERYTHING, with_variables
from monitoring.dashboards import DASHBOARDS
from monitoring.rules import Rule, load_rules
from tests.monitoring.support.promql import labels_listed, selectors

NOT_AT_ONCE = frozenset(
    {"raydix:prefix_cache_hit:ratio1d_offset1h", "raydix_gpu_utilization_ratio", "raydix_rollout_state"}
)
"""Series that have no data in an application's first hour, or without a GPU or a rollout."""


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, ready to be evaluated."""

    expr: str
    source: str
    """Its origin, e.g. "raydix-engine: Running and waiting [0]"."""
    expects_data: bool
    """Whether any application under load has data for it; False where an event such as an error comes first."""


def dashboard_queries(variables: Mapping[str, str] = EVERYTHING) -> list[Query]:
    """Return the queries of every panel; `variables` are merged over `EVERYTHING`."""
    values = {**EVERYTHING, **variables}
    return [
        Query(
            with_variables(target.expr, values), f"{dashboard.uid}: {panel.title} [{index}]", not target.is_sparse
        )
        for dashboard in DASHBOARDS
        for panel in dashboard.panels()
        for index, target in enumerate(panel.targets)
    ]


def answered(expr: str) -> str:
    """Return an alert's expression with 0 or 1 as the result of its comparisons, instead of a filter.

    It has data whether or not the alert fires: all series that it reads exist, and the sides of its `and` have
    labels in common.
    """
    return re.sub(r"(?<![=!])(==|!=|>=|<=|>|<)(?=\s*\d)", r"\1 bool", expr)


def recorded_labels(rules: Sequence[Rule]) -> dict[str, set[str]]:
    """Return the labels of the series of recording rules: those that they group by, or those of their input."""
    recorded: dict[str, set[str]] = {}
    for rule in rules:
        if rule.kind == "record":
            read = [recorded[selector.name] for selector in selectors(rule.expr) if selector.name in recorded]
            recorded[rule.name] = labels_listed(rule.expr).union(*read)
    return recorded


def alert_queries() -> list[Query]:
    """Return the rules' queries; alerts also as `answered`, which has data although nothing fires."""
    queries = []
    for rule in load_rules():
        is_ready = not NOT_AT_ONCE & {rule.name, *(selector.name for selector in selectors(rule.expr))}
        if rule.kind == "record":
            queries.append(Query(rule.expr, f"record {rule.name}", is_ready))
        else:
            queries.append(Query(rule.expr, f"alert {rule.name}", False))
            is_ready = is_ready and not rule.expr.startswith("absent(")
            queries.append(Query(answered(rule.expr), f"alert {rule.name}, answered", is_ready))
    return queries
