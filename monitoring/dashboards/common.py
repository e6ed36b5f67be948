"""What the dashboards share: uids, variables, targets of the service levels."""

from __future__ import annotations

from monitoring.dashboards.expressions import Expressions
from monitoring.dashboards.model import Threshold, Variable

FLEET = Expressions()
"""All replicas of the chosen models."""
ENGINES = Expressions(per_replica=True)
"""The chosen replicas."""

APPLICATION = Variable("job", "Application", "label_values(raydix_metrics_processes, job)")
"""One application is one scrape job: its page is the sum of all its processes."""
MODEL = Variable("model", "Model", 'label_values(raydix_engine_up{job=~"$job"}, model_name)')
REPLICA = Variable(
    "replica", "Replica", 'label_values(raydix_engine_up{job=~"$job", model_name=~"$model"}, replica)'
)
TENANT = Variable("tenant", "Tenant", 'label_values(raydix_tenant_requests_total{job=~"$job"}, tenant)')

TTFT_S, ITL_S, E2E_S = 1.0, 0.1, 30.0
"""Defaults of the settings `slo`."""
OBJECTIVE = 0.99
"""Share of requests that should meet each of them."""


def limit(value: float) -> tuple[Threshold, ...]:
    """Good below, bad from there on."""
    return (Threshold(value, "red"),)
