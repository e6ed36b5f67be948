"""The Overview dashboard: the service's quality for its users, and its throughput."""

from __future__ import annotations

from monitoring.dashboards.common import APPLICATION, E2E_S, FLEET, ITL_S, MODEL, OBJECTIVE, TTFT_S, limit
from monitoring.dashboards.model import Dashboard, Panel, PanelRow, Target, Threshold, Unit

_HIT_RATE = FLEET.share(FLEET.rate("prefix_cache_hit_tokens_total"), FLEET.rate("prefix_cache_query_tokens_total"))
_RECOMPUTE_HIT_RATE = FLEET.share(
    FLEET.rate("prefix_cache_recompute_hit_tokens_total"),
    FLEET.rate("prefix_cache_recompute_query_tokens_total"),
)
_FAILED = FLEET.rate("requests_total", finish_reason="error")
_MET = FLEET.share(FLEET.rate("slo_requests_total", "slo", met="true"), FLEET.rate("slo_requests_total", "slo"))
_UP = FLEET.gauge("engine_up")
_EXPECTED = FLEET.gauge("replicas_expected", "model_name", how="max")


def _quantiles(name: str) -> tuple[Target, ...]:
    return tuple(Target(FLEET.quantile(q, name), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99))


_NOW = PanelRow(
    "Now",
    (
        Panel(
            "Requests",
            "Finished requests per second, however they ended.",
            Unit.REQUESTS_PER_SECOND,
            (Target(FLEET.rate("requests_total"), "requests"),),
            width=4,
            kind="stat",
        ),
        Panel(
            "Generated tokens",
            "Tokens written per second, over all replicas.",
            Unit.TOKENS_PER_SECOND,
            (Target(FLEET.rate("generation_tokens_total"), "generated"),),
            width=4,
            kind="stat",
        ),
        Panel(
            "Prefix hit rate",
            "Share of new requests' prompt tokens whose KV was found in a cache instead of computed.",
            Unit.SHARE,
            (Target(_HIT_RATE, "hit rate"),),
            width=4,
            kind="stat",
            max=1.0,
        ),
        Panel(
            "TTFT p95",
            f"95 % of requests had their first token within this time. The target is {TTFT_S:g} s.",
            Unit.SECONDS,
            (Target(FLEET.quantile(0.95, "time_to_first_token_seconds"), "p95"),),
            width=4,
            kind="stat",
            thresholds=limit(TTFT_S),
        ),
        Panel(
            "Failed requests",
            "Share of requests that ended with an error after they had been accepted.",
            Unit.SHARE,
            (Target(FLEET.share(_FAILED, FLEET.rate("requests_total")), "failed"),),
            width=4,
            kind="stat",
            thresholds=(Threshold(0.001, "orange"), Threshold(1 - OBJECTIVE, "red")),
            max=1.0,
        ),
        Panel(
            "Replicas up",
            "Share of the configured engine replicas that are alive. Red: none; orange: some are missing.",
            Unit.SHARE,
            (Target(FLEET.share(_UP, f"sum({_EXPECTED})"), "up"),),
            width=4,
            kind="stat",
            base="red",
            thresholds=(Threshold(0.01, "orange"), Threshold(1.0, "green")),
        ),
    ),
    height=4,
)

_LEVELS = PanelRow(
    "Service levels",
    (
        Panel(
            "Time to first token",
            f"From a request's arrival to its first token; the line is the target of {TTFT_S:g} s. When it rises, "
            "see the queue and prefill times on the Engine dashboard.",
            Unit.SECONDS,
            _quantiles("time_to_first_token_seconds"),
            thresholds=limit(TTFT_S),
        ),
        Panel(
            "Time between tokens",
            "Time between two tokens, and its average over a request. The line is the target of "
            f"{ITL_S:g} s for the average. When it rises, look at step time and batch size on the Engine "
            "dashboard.",
            Unit.SECONDS,
            (
                *_quantiles("inter_token_latency_seconds"),
                Target(FLEET.quantile(0.95, "time_per_output_token_seconds"), "requests' means, p95"),
            ),
            thresholds=limit(ITL_S),
        ),
        Panel(
            "Time to the last token",
            f"From a request's arrival to its end; the line is the target of {E2E_S:g} s. It grows with the "
            "length of answers, too.",
            Unit.SECONDS,
            _quantiles("request_duration_seconds"),
            thresholds=limit(E2E_S),
        ),
        Panel(
            "Requests that met their target",
            f"Share of finished requests within the target, by target. The objective is {OBJECTIVE:.0%}.",
            Unit.SHARE,
            (Target(_MET, "{{slo}}"),),
            width=12,
            base="red",
            thresholds=(Threshold(OBJECTIVE, "green"),),
            max=1.0,
            soft_min=0.9,
        ),
        Panel(
            "Error budget burn",
            f"How many times faster than allowed the budget of {1 - OBJECTIVE:.0%} missed targets is used up. 1 "
            "just keeps the objective; 14.4 for an hour uses 2 % of a month's budget.",
            Unit.FACTOR,
            (Target(f"(1 - {_MET}) / {1 - OBJECTIVE:.2g}", "{{slo}}"),),
            width=12,
            thresholds=(Threshold(1.0, "orange"), Threshold(14.4, "red")),
        ),
    ),
)

_THROUGHPUT = PanelRow(
    "Throughput",
    (
        Panel(
            "Requests by how they ended",
            "Finished requests per second. stop and length are answers; abort: the client left; error: see "
            "Errors.",
            Unit.REQUESTS_PER_SECOND,
            (Target(FLEET.rate("requests_total", "finish_reason"), "{{finish_reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "Tokens",
            "Prompt tokens computed, prompt tokens found in a cache, and tokens generated, per second.",
            Unit.TOKENS_PER_SECOND,
            (
                Target(FLEET.rate("prompt_tokens_total", source="computed"), "prompt, computed"),
                Target(FLEET.rate("prompt_tokens_total", source="device"), "prompt, cached"),
                Target(FLEET.rate("prompt_tokens_total", source="host"), "prompt, from host memory"),
                Target(FLEET.rate("generation_tokens_total"), "generated"),
            ),
            is_stacked=True,
        ),
        Panel(
            "Prefix cache hit rate",
            "Share of looked-up prompt tokens that a cache held. Requests that resume after a preemption or on "
            "another replica find tokens that were computed for them before, so they are counted separately.",
            Unit.SHARE,
            (
                Target(_HIT_RATE, "new requests"),
                Target(_RECOMPUTE_HIT_RATE, "resumed"),
            ),
            max=1.0,
        ),
        Panel(
            "Requests in the system",
            "Running in a batch, waiting in an engine, and waiting in an ingress for an engine that has room. "
            "If requests wait all the time, there are too few replicas.",
            Unit.COUNT,
            (
                Target(FLEET.gauge("requests_running"), "running"),
                Target(FLEET.gauge("requests_waiting"), "waiting in engines"),
                Target(FLEET.gauge("admission_waiting_requests"), "waiting in ingresses"),
            ),
            width=12,
            is_stacked=True,
        ),
        Panel(
            "Length of requests",
            "Median and 95th percentile of tokens in prompts and answers. Judge a change of latency together with "
            "it.",
            Unit.TOKENS,
            tuple(
                Target(FLEET.quantile(q, f"request_{part}_tokens"), f"{part} p{q * 100:g}")
                for part in ("prompt", "output")
                for q in (0.5, 0.95)
            ),
            width=12,
        ),
    ),
)

_GRAMMARS = PanelRow(
    "Structured output",
    (
        Panel(
            "Grammars by result",
            "Requests whose answer must match a grammar, per second. hit: known to be usable; miss: checked and "
            "usable; rejected: not usable, a 400; timeout: too complex, a 400 as well.",
            Unit.REQUESTS_PER_SECOND,
            (Target(FLEET.rate("grammar_requests_total", "result"), "{{result}}"),),
            width=12,
            is_stacked=True,
        ),
        Panel(
            "Time to check a grammar",
            "Time to check a grammar that is not known yet. It is part of the time to first token.",
            Unit.SECONDS,
            tuple(
                Target(FLEET.quantile(q, "grammar_compile_seconds"), f"p{q * 100:g}", is_sparse=True)
                for q in (0.5, 0.95)
            ),
            width=12,
        ),
        Panel(
            "Grammars compiled by engines",
            "Requests whose answer must match a grammar, per second, at engines. hit: it was compiled already; "
            "miss: the engine compiled it, which takes milliseconds, and for a few grammars seconds.",
            Unit.REQUESTS_PER_SECOND,
            (Target(FLEET.rate("grammar_cache_requests_total", "result"), "{{result}}"),),
            width=12,
            is_stacked=True,
        ),
        Panel(
            "Memory of compiled grammars",
            "Bytes of the compiled grammars that each engine keeps, at most engine.grammar_cache_bytes.",
            Unit.BYTES,
            (Target(FLEET.gauge("grammar_cache_bytes", "replica"), "{{replica}}"),),
            width=12,
        ),
    ),
)

_ERRORS = PanelRow(
    "Errors",
    (
        Panel(
            "Errors by type",
            "Requests answered with an error, per second. 4xx are mostly clients' mistakes, 5xx are ours.",
            Unit.REQUESTS_PER_SECOND,
            (
                Target(
                    FLEET.rate("request_errors_total", "status", "error_type"),
                    "{{status}} {{error_type}}",
                    is_sparse=True,
                ),
            ),
            is_stacked=True,
        ),
        Panel(
            "Rejections by reason",
            "Requests refused before any work was done, per second. queue_full and unavailable: the fleet is too "
            "small; the others are limits of tenants.",
            Unit.REQUESTS_PER_SECOND,
            (Target(FLEET.rate("admission_rejections_total", "reason"), "{{reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "HTTP answers by status",
            "All HTTP requests, administration and probes included, per second.",
            Unit.REQUESTS_PER_SECOND,
            (Target(FLEET.rate("http_requests_total", "status"), "{{status}}"),),
            is_stacked=True,
        ),
        Panel(
            "Delay of event loops",
            "Longest delay in the last minute, by ingress: all streams of the ingress pause meanwhile. Below "
            "0.05 s if the ingress has a core. In its own part the ingress computed; in the rest it waited for "
            "a processor.",
            Unit.SECONDS,
            (
                Target(FLEET.gauge("ingress_loop_lag_seconds", "replica", how="max"), "{{replica}}"),
                Target(FLEET.gauge("ingress_loop_own_lag_seconds", "replica", how="max"), "{{replica}}, its own"),
            ),
            thresholds=(Threshold(0.05, "orange"), Threshold(0.25, "red")),
        ),
        Panel(
            "Replicas",
            "Engine replicas that are alive, and those that the configuration asks for. Autoscaling changes the "
            "latter.",
            Unit.COUNT,
            (
                Target(FLEET.gauge("engine_up", "model_name"), "{{model_name}} up"),
                Target(_EXPECTED, "{{model_name}} expected"),
            ),
        ),
        Panel(
            "Streams that broke off or moved",
            "Clients that disconnected before the end, streams that lost their replica and resumed elsewhere, and "
            "streams that could not resume, per second.",
            Unit.EVENTS_PER_SECOND,
            (
                Target(FLEET.rate("stream_disconnects_total"), "client left"),
                Target(FLEET.rate("migrations_total", outcome="resumed"), "moved to another replica"),
                Target(FLEET.rate("migrations_total", outcome="gave_up|no_replica"), "lost"),
            ),
        ),
    ),
)

OVERVIEW = Dashboard(
    "raydix-overview",
    "Raydix: Overview",
    "Service levels, throughput, hit rate and errors of the whole service.",
    (
        APPLICATION,
        MODEL,
    ),
    (_NOW, _LEVELS, _THROUGHPUT, _GRAMMARS, _ERRORS),
)
