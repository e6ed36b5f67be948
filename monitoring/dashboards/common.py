"""Uids, variables and service level targets that all dashboards share."""

from __future__ import annotations

from monitoring.dashboards.expressions import Expressions
from monitoring.dashboards.model import Threshold, Variable

FLEET = Expressions()
"""Expressions over all replicas of the chosen models."""
ENGINES = Expressions(per_replica=True)
"""Expressions over the chosen replicas."""

APPLICATION = Variable("job", "Application", "label_values(raydix_metrics_processes, job)")
"""Choice of an application, which is one scrape job whose page sums all its processes."""
MODEL = Variable("model", "Model", 'label_values(raydix_engine_up{job=~"$job"}, model_name)')
REPLICA = Variable(
    "replica", "Replica", 'label_values(raydix_engine_up{job=~"$job", model_name=~"$model"}, replica)'
)
TENANT = Variable("tenant", "Tenant", 'label_values(raydix_tenant_requests_total{job=~"$job"}, tenant)')

TTFT_S, ITL_S, E2E_S = 1.0, 0.1, 30.0
"""Defaults of the settings `slo`."""
OBJECTIVE = 0.99
"""Share of requests that should meet each target."""


def limit(value: float) -> tuple[Threshold, ...]:
    """Return thresholds for a value that is good below the limit and bad from the limit on."""
    return (Threshold(value, "red"),)
