"""Every expression that dashboards and alerts send to Prometheus, in its final form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from monitoring.dashboards import DASHBOARDS
from monitoring.promql import selectors
from monitoring.rules import load_rules

EVERYTHING: Mapping[str, str] = {
    "job": ".*",
    "model": ".*",
    "replica": ".*",
    "tenant": ".*",
    "__rate_interval": "1m",
}
"""Grafana's values for its variables where nothing is chosen."""
NOT_AT_ONCE = frozenset({"raydix:prefix_cache_hit:ratio1d_offset1h", "raydix_gpu_utilization_ratio"})
"""Series that have no data in an application's first hour, or without a GPU."""

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")


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


def with_variables(expr: str, values: Mapping[str, str]) -> str:
    """Return an expression with Grafana's variables replaced. Raises KeyError for a variable without a value."""
    return _VARIABLE.sub(lambda found: values[found[1] or found[2]], expr)


def alert_queries() -> list[Query]:
    """Return the rules' queries; alerts also as `Rule.answered`, which has data although nothing fires."""
    queries = []
    for rule in load_rules():
        is_ready = not NOT_AT_ONCE & {rule.name, *(selector.name for selector in selectors(rule.expr))}
        if rule.kind == "record":
            queries.append(Query(rule.expr, f"record {rule.name}", is_ready))
        else:
            queries.append(Query(rule.expr, f"alert {rule.name}", False))
            is_ready = is_ready and not rule.expr.startswith("absent(")
            queries.append(Query(rule.answered(), f"alert {rule.name}, answered", is_ready))
    return queries
