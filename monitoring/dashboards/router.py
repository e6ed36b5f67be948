"""The Router dashboard: which replicas receive requests, why, and how good the decisions are."""

from __future__ import annotations

from monitoring.dashboards.common import APPLICATION, ENGINES, FLEET, MODEL, REPLICA
from monitoring.dashboards.model import Dashboard, Panel, PanelRow, Target, Threshold, Unit

_WAITING = ENGINES.gauge("waiting_prefill_tokens", "replica")
_RUNNING = ENGINES.gauge("requests_running", "replica")
_COMPUTED = ENGINES.rate("prompt_tokens_total", "replica", source="computed")


def _skew(by_replica: str) -> str:
    """Return the fullest replica over the mean; NaN while all are empty."""
    return f"max({by_replica}) / avg({by_replica})"


_DECISIONS = PanelRow(
    "Decisions",
    (
        Panel(
            "Decisions by reason",
            "Why requests went to their replicas, per second. holder: the replica with the longest cached prefix; "
            "cheaper: it costs less although it holds less; cold: no replica holds any of it; session, hash: the "
            "session or prefix belongs there; rule: a custom policy.",
            Unit.REQUESTS_PER_SECOND,
            (Target(FLEET.rate("router_decisions_total", "reason"), "{{reason}}"),),
            width=12,
            is_stacked=True,
        ),
        Panel(
            "Predicted and actual hits",
            "Prompt tokens that the router expected in the chosen replica's cache, and tokens that were there, "
            "per second. If fewer were there, the router's knowledge is old, or pages were evicted meanwhile.",
            Unit.TOKENS_PER_SECOND,
            (Target(FLEET.rate("router_hit_tokens_total", "kind"), "{{kind}}"),),
            width=12,
        ),
        Panel(
            "Regret",
            "Prompt tokens per second that another replica held and the chosen one did not: the cost of balancing "
            "load.",
            Unit.TOKENS_PER_SECOND,
            (Target(FLEET.rate("router_regret_tokens_total"), "cached elsewhere"),),
        ),
        Panel(
            "Time to decide",
            "Median and 99th percentile: hashing the prompt, looking it up, comparing replicas.",
            Unit.SECONDS,
            tuple(Target(FLEET.quantile(q, "router_decision_seconds"), f"p{q * 100:g}") for q in (0.5, 0.99)),
            thresholds=(Threshold(0.01, "orange"),),
        ),
        Panel(
            "Requests that no policy placed",
            "Failures of the policy per second; the least loaded replica got the request. Any is a defect "
            "of the policy.",
            Unit.REQUESTS_PER_SECOND,
            (Target(FLEET.rate("router_errors_total"), "failures"),),
            thresholds=(Threshold(0.001, "red"),),
        ),
    ),
)

_BALANCE = PanelRow(
    "Balance",
    (
        Panel(
            "Skew over replicas",
            "The fullest replica over the mean: prompt tokens to compute, running requests, and prompt tokens "
            "computed per second. 1 is even. Short peaks are normal when new prefixes arrive; a lasting 2 is not.",
            Unit.FACTOR,
            (
                Target(_skew(_WAITING), "prompt tokens to compute"),
                Target(_skew(_RUNNING), "running requests"),
                Target(_skew(_COMPUTED), "prompt tokens computed"),
            ),
        ),
        Panel(
            "Prompt tokens computed",
            "Prompt tokens computed per second, by replica. A balanced fleet shows even heights.",
            Unit.TOKENS_PER_SECOND,
            (Target(_COMPUTED, "{{replica}}"),),
            is_stacked=True,
        ),
        Panel(
            "Prompt tokens found cached",
            "Prompt tokens found in the cache per second, by replica: the work that was saved, and where.",
            Unit.TOKENS_PER_SECOND,
            (Target(ENGINES.rate("prompt_tokens_total", "replica", source="device"), "{{replica}}"),),
            is_stacked=True,
        ),
    ),
)

_KNOWLEDGE = PanelRow(
    "What the router knows",
    (
        Panel(
            "Age of its knowledge",
            "Age of the oldest report of a replica's cache, by ingress. It should stay near 1 s.",
            Unit.SECONDS,
            (Target(FLEET.gauge("router_index_lag_seconds", "replica", how="max"), "{{replica}}"),),
            thresholds=(Threshold(5.0, "orange"), Threshold(10.0, "red")),
        ),
        Panel(
            "Blocks in its index",
            "Blocks of prefixes that each ingress knows of, over all replicas, and how many it has room for.",
            Unit.COUNT,
            (
                Target(FLEET.gauge("router_index_blocks", "replica"), "{{replica}}"),
                Target(FLEET.gauge("router_index_capacity_blocks", "replica"), "{{replica}}: room"),
            ),
        ),
        Panel(
            "Replicas by state",
            "The highest count of any ingress. lost: silent or dead; failing: its steps fail or its engine has "
            "ended; circuit_open: failed too often and gets no requests for a while.",
            Unit.COUNT,
            (Target(FLEET.gauge("router_replicas", "state", how="max"), "{{state}}"),),
            is_stacked=True,
        ),
        Panel(
            "Rejected messages",
            "Messages dropped on the wire between ingresses and replicas, per second. Gaps and congestion heal by "
            "themselves; unauthenticated and malformed messages should never occur.",
            Unit.EVENTS_PER_SECOND,
            (
                Target(FLEET.rate("wire_rejected_messages_total", "kind"), "by replicas: {{kind}}"),
                Target(FLEET.rate("wire_dropped_messages_total", "kind"), "by ingresses: {{kind}}"),
            ),
            width=16,
            is_stacked=True,
        ),
        Panel(
            "Blocks that found no room",
            "Blocks forgotten because the index was full, per second: their prefixes are not found. Those that no "
            "prompt had lately go first.",
            Unit.EVENTS_PER_SECOND,
            (Target(FLEET.rate("router_index_dropped_blocks_total"), "blocks"),),
            thresholds=(Threshold(1.0, "orange"),),
        ),
    ),
)

_LOSSES = PanelRow(
    "Lost replicas",
    (
        Panel(
            "Migrations",
            "Streams that lost their replica after the first token, per second, by the reason of the loss and by "
            "their outcome.",
            Unit.EVENTS_PER_SECOND,
            (Target(FLEET.rate("migrations_total", "reason", "outcome"), "{{reason}}: {{outcome}}"),),
            is_stacked=True,
        ),
        Panel(
            "Pause of a moved stream",
            "Median and 95th percentile of the time from the last token before the move to the first after it.",
            Unit.SECONDS,
            tuple(Target(FLEET.quantile(q, "migration_gap_seconds"), f"p{q * 100:g}") for q in (0.5, 0.95)),
        ),
        Panel(
            "Retries, hedges and suspects",
            "Requests per second that were sent again because their replica was lost before the first token, or "
            "sent twice because they were slow to begin; and the outcome of requests whose replica died.",
            Unit.REQUESTS_PER_SECOND,
            (
                Target(FLEET.rate("retries_total", "reason"), "retry: {{reason}}"),
                Target(FLEET.rate("hedges_total", "outcome"), "hedge: {{outcome}}"),
                Target(FLEET.rate("suspects_total", "outcome"), "suspect: {{outcome}}"),
            ),
            is_stacked=True,
        ),
    ),
)

ROUTER = Dashboard(
    "raydix-router",
    "Raydix: Router",
    "Where requests go, what the router knows, and what happens when a replica is lost.",
    (APPLICATION, MODEL, REPLICA),
    (_DECISIONS, _BALANCE, _KNOWLEDGE, _LOSSES),
)
