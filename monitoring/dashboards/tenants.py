"""The Tenants dashboard: how much tenants ask for, how long they wait, and what is refused."""

from __future__ import annotations

from monitoring.dashboards.common import APPLICATION, FLEET, MODEL, TENANT
from monitoring.dashboards.model import Dashboard, Panel, PanelRow, Target, Unit

_CHOSEN = {"tenant": "$tenant"}
_TOKENS = FLEET.rate("tenant_tokens_total", "tenant", **_CHOSEN)

_USE = PanelRow(
    "Use",
    (
        Panel(
            "Requests",
            "Requests to generate per second, by tenant, refused ones included.",
            Unit.REQUESTS_PER_SECOND,
            (Target(FLEET.rate("tenant_requests_total", "tenant", **_CHOSEN), "{{tenant}}"),),
            is_stacked=True,
        ),
        Panel(
            "Prompt tokens",
            "Per second, as the tenants' limits count them.",
            Unit.TOKENS_PER_SECOND,
            (Target(FLEET.rate("tenant_tokens_total", "tenant", kind="prompt", **_CHOSEN), "{{tenant}}"),),
            is_stacked=True,
        ),
        Panel(
            "Generated tokens",
            "Per second, as the tenants' limits count them.",
            Unit.TOKENS_PER_SECOND,
            (Target(FLEET.rate("tenant_tokens_total", "tenant", kind="generated", **_CHOSEN), "{{tenant}}"),),
            is_stacked=True,
        ),
        Panel(
            "Share of tokens",
            "Share of all tenants' tokens, prompts and answers together. It must follow their weights only while "
            "all of them wait.",
            Unit.SHARE,
            (Target(f"{_TOKENS} / on () group_left () {FLEET.rate('tenant_tokens_total')}", "{{tenant}}"),),
            width=24,
            is_stacked=True,
            max=1.0,
        ),
    ),
)

_WAIT = PanelRow(
    "Waiting and refusal",
    (
        Panel(
            "Median wait for an engine",
            "In the ingress, where tenants take turns, by tenant. A tenant that stays within its share hardly "
            "waits.",
            Unit.SECONDS,
            (Target(FLEET.quantile(0.5, "tenant_queue_seconds", "tenant", **_CHOSEN), "{{tenant}}"),),
        ),
        Panel(
            "95th percentile of that wait",
            "By tenant. Far above the median: it asks in bursts, or for more than its share.",
            Unit.SECONDS,
            (Target(FLEET.quantile(0.95, "tenant_queue_seconds", "tenant", **_CHOSEN), "{{tenant}}"),),
        ),
        Panel(
            "Rejections",
            "Requests refused before any work was done, per second, by tenant and reason. requests_per_minute, "
            "tokens_per_minute and max_concurrency are the tenant's own limits.",
            Unit.REQUESTS_PER_SECOND,
            (
                Target(
                    FLEET.rate("tenant_rejections_total", "tenant", "reason", **_CHOSEN),
                    "{{tenant}}: {{reason}}",
                    is_sparse=True,
                ),
            ),
            is_stacked=True,
        ),
    ),
)

TENANTS = Dashboard(
    "raydix-tenants",
    "Raydix: Tenants",
    "Requests, tokens, waiting and refusals by tenant.",
    (APPLICATION, MODEL, TENANT),
    (_USE, _WAIT),
)
