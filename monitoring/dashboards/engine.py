"""The Engine dashboard: what engines do, where a step's time goes, and how full their memory is."""

from __future__ import annotations

from monitoring.dashboards.common import APPLICATION, ENGINES, MODEL, REPLICA
from monitoring.dashboards.model import Dashboard, Panel, PanelRow, Target, Threshold, Unit

_STAGES = ENGINES.rate("engine_stage_seconds_total", "stage")
_ACTIVE = ENGINES.share(
    ENGINES.gauge("kv_pages", "replica", state="active", tier="device"),
    ENGINES.gauge("kv_pages_capacity", "replica", tier="device"),
)


def _quantiles(name: str, *quantiles: float, by: str = "", legend: str = "") -> tuple[Target, ...]:
    """Return targets of a histogram that has data whenever requests are served."""
    prefix = f"{{{{{by}}}}} " if by else f"{legend} " if legend else ""
    labels = (by,) if by else ()
    return tuple(Target(ENGINES.quantile(q, name, *labels), f"{prefix}p{q * 100:g}") for q in quantiles)


_BATCH = PanelRow(
    "Work",
    (
        Panel(
            "Running and waiting",
            "Requests in the batch, and requests that wait: for room (capacity), or for another request that "
            "computes the same first page (deferred). If many wait for capacity while the batch is small, there "
            "are too few KV pages.",
            Unit.COUNT,
            (
                Target(ENGINES.gauge("requests_running"), "running"),
                Target(ENGINES.gauge("requests_waiting", "reason"), "waiting: {{reason}}"),
            ),
            is_stacked=True,
        ),
        Panel(
            "Oldest in the queue",
            "How long the oldest waiting request has waited, by replica.",
            Unit.SECONDS,
            (Target(ENGINES.gauge("queue_oldest_age_seconds", "replica", how="max"), "{{replica}}"),),
            thresholds=(Threshold(10.0, "red"),),
        ),
        Panel(
            "Prompt tokens to compute",
            "Prompt tokens of waiting and running requests, by replica. If one replica is far above the others, "
            "see Skew on the Router dashboard.",
            Unit.TOKENS,
            (Target(ENGINES.gauge("waiting_prefill_tokens", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Requests in a step",
            "Mean over the steps of each kind, of all replicas. Larger batches use the hardware better.",
            Unit.COUNT,
            (Target(ENGINES.mean("engine_batch_requests", "phase"), "{{phase}}"),),
        ),
        Panel(
            "Tokens in a step",
            "Mean over the steps of each kind, of all replicas. Prefill is cut to the settings max_step_tokens, "
            "max_step_ms and max_step_stretch.",
            Unit.TOKENS,
            (Target(ENGINES.mean("engine_batch_tokens", "phase"), "{{phase}}"),),
        ),
        Panel(
            "Time before, in and after prefill",
            "95th percentile of a request's wait in the engine, its prompt's computation and its tokens after the "
            "first, over all replicas.",
            Unit.SECONDS,
            tuple(
                Target(ENGINES.quantile(0.95, f"request_{part}_seconds"), f"{part} p95")
                for part in ("queue", "prefill", "decode")
            ),
        ),
    ),
)

_STEPS = PanelRow(
    "Steps",
    (
        Panel(
            "Step time",
            "Median and 99th percentile by kind of step, over all replicas. A decode step is the least time "
            "between two tokens; a mixed step also computes prompts and holds decodes up.",
            Unit.SECONDS,
            _quantiles("engine_step_seconds", 0.5, 0.99, by="phase"),
            width=12,
        ),
        Panel(
            "Where a step's time goes",
            "Share of the engine loop's time by stage. forward should be nearly all of it; the rest is overhead.",
            Unit.SHARE,
            (
                Target(
                    f"{_STAGES} / on () group_left () {ENGINES.rate('engine_stage_seconds_total')}", "{{stage}}"
                ),
            ),
            width=12,
            is_stacked=True,
            max=1.0,
        ),
        Panel(
            "Steps",
            "Steps per second by replica, and failed steps by cause. If requests wait and there are no steps, the "
            "engine is stalled. An engine whose self-tests fail is replaced.",
            Unit.EVENTS_PER_SECOND,
            (
                Target(ENGINES.rate("engine_steps_total", "replica"), "{{replica}}"),
                Target(
                    ENGINES.rate("engine_failed_steps_total", "replica", "cause"), "{{replica}} failed: {{cause}}"
                ),
            ),
        ),
        Panel(
            "How steps were launched",
            "Steps launched as a recorded graph, or operator by operator (eager), per second. On a GPU, decode "
            "steps should be graph replays.",
            Unit.EVENTS_PER_SECOND,
            (Target(ENGINES.rate("engine_graph_replays_total", "mode"), "{{mode}}"),),
            is_stacked=True,
        ),
        Panel(
            "GPU utilisation",
            "Share of the time in which the GPU was busy, by replica. Absent on CPUs. If it is low while requests "
            "wait, the loop or the batch limits are in the way.",
            Unit.SHARE,
            (Target(ENGINES.gauge("gpu_utilization_ratio", "replica", how="avg"), "{{replica}}", is_sparse=True),),
            max=1.0,
        ),
    ),
)

_MEMORY = PanelRow(
    "KV memory",
    (
        Panel(
            "KV pages by state",
            "Active pages belong to requests, cached ones hold prefixes and can be evicted, free ones hold "
            "nothing. A full cache is good: free pages are unused memory.",
            Unit.COUNT,
            (Target(ENGINES.gauge("kv_pages", "state", tier="device"), "{{state}}"),),
            is_stacked=True,
        ),
        Panel(
            "Pages that requests use",
            "Share of pages that are active, by replica. Near 100 % requests are preempted: run fewer at a time, "
            "shorten prompts, or add memory.",
            Unit.SHARE,
            (Target(_ACTIVE, "{{replica}}"),),
            thresholds=(Threshold(0.8, "orange"), Threshold(0.95, "red")),
            max=1.0,
        ),
        Panel(
            "Slots for recurrent states",
            "Only of models with recurrent layers: states of running requests, and snapshots, from which prompts "
            "with the same beginning resume. Without free slots, the least recently used snapshot is given up for "
            "a new one.",
            Unit.COUNT,
            (Target(ENGINES.gauge("state_slots", "state"), "{{state}}"),),
            is_stacked=True,
        ),
        Panel(
            "KV in host memory and files",
            "Host pages that hold the KV of preempted requests, and of prefixes that the device evicted, and all "
            "host pages, by replica. A preempted request takes pages of prefixes; if there are none, its KV is "
            "computed again. Replicas that share files each count all of these files.",
            Unit.COUNT,
            (
                Target(ENGINES.gauge("kv_pages", "replica", state="active", tier="host"), "{{replica}}, requests"),
                Target(ENGINES.gauge("kv_pages", "replica", state="cached", tier="host"), "{{replica}}, prefixes"),
                Target(ENGINES.gauge("kv_pages_capacity", "replica", tier="host"), "{{replica}}, all"),
                Target(ENGINES.gauge("kv_pages", "replica", state="cached", tier="file"), "{{replica}}, in files"),
            ),
        ),
        Panel(
            "Preemptions",
            "Requests put back in the queue for lack of KV pages, per second. Now and then is fine; steadily "
            "means that memory is too small for the load. Their KV is copied to host memory (swap) or computed "
            "again.",
            Unit.EVENTS_PER_SECOND,
            (Target(ENGINES.rate("preemptions_total", "replica", "mode"), "{{replica}} {{mode}}"),),
        ),
        Panel(
            "Evictions",
            "Cached pages evicted per second: for lack of room (capacity), or because the cache was emptied "
            "(reset). Pages of the device go to host memory if several requests have used them.",
            Unit.PAGES_PER_SECOND,
            (Target(ENGINES.rate("kv_evictions_total", "tier", "reason"), "{{tier}}, {{reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "Pages moved",
            "KV pages copied per second: out of the device to host memory, from there to files, to replicas that "
            "fetch them (peer), and in again when a prompt or a preempted request continues there. Many in and "
            "few out are best: a page that was copied once is used often. Failed pages were computed.",
            Unit.PAGES_PER_SECOND,
            (
                Target(ENGINES.rate("kv_transfer_pages_total", "tier", "direction"), "{{tier}}, {{direction}}"),
                Target(ENGINES.rate("kv_transfer_failed_pages_total", "tier"), "{{tier}}, failed"),
            ),
            width=6,
        ),
        Panel(
            "Prefill saved by host memory",
            "Seconds of prefill that copies from host memory have saved since each engine's start, at the rates "
            "measured then, minus the time of the copies.",
            Unit.SECONDS,
            (Target(ENGINES.gauge("kv_saved_seconds", "replica", tier="host"), "{{replica}}"),),
            width=6,
        ),
        Panel(
            "Events for other routers",
            "Blocks per second that were announced to other systems' routers (engines.kv_events), and these "
            "routers' requests for missed events, by the answer: kept events, all held blocks (snapshot), or "
            "neither.",
            Unit.EVENTS_PER_SECOND,
            (
                Target(ENGINES.rate("kv_event_blocks_total", "event"), "blocks {{event}}"),
                Target(ENGINES.rate("kv_event_replays_total", "outcome"), "replays, {{outcome}}"),
            ),
            width=6,
        ),
        Panel(
            "Age of evicted pages",
            "From taking a page to its eviction, and from its last use to its eviction, of sampled pages, over "
            "all replicas. If this is shorter than the pause between turns of a conversation, the cache is too "
            "small for conversations.",
            Unit.SECONDS,
            (
                *(
                    Target(ENGINES.quantile(q, "kv_page_lifetime_seconds"), f"lifetime p{q * 100:g}")
                    for q in (0.5, 0.95)
                ),
                *(
                    Target(ENGINES.quantile(q, "kv_page_idle_before_evict_seconds"), f"idle p{q * 100:g}")
                    for q in (0.5, 0.95)
                ),
            ),
            width=6,
        ),
    ),
)

_SPECULATION = PanelRow(
    "Speculative decoding",
    (
        Panel(
            "Draft tokens",
            "Draft tokens of speculative decoding per second: verified by the model, and accepted. Zero if "
            "speculation is off. An engine drafts less if few of its draft tokens are accepted.",
            Unit.TOKENS_PER_SECOND,
            (
                Target(ENGINES.rate("spec_draft_tokens_total"), "verified"),
                Target(ENGINES.rate("spec_accepted_tokens_total"), "accepted"),
            ),
            width=12,
        ),
        Panel(
            "Accepted draft tokens",
            "Share of verified draft tokens that were accepted, by replica. Each saves a step of its request.",
            Unit.SHARE,
            (
                Target(
                    ENGINES.share(
                        ENGINES.rate("spec_accepted_tokens_total", "replica"),
                        ENGINES.rate("spec_draft_tokens_total", "replica"),
                    ),
                    "{{replica}}",
                    is_sparse=True,
                ),
            ),
            width=12,
            max=1.0,
        ),
    ),
)

_WARM_UP = PanelRow(
    "Warm-up",
    (
        Panel(
            "Prefixes computed before the first request",
            "Prefixes by replica since it started: a new replica first computes those that the fleet shares most.",
            Unit.COUNT,
            (Target(ENGINES.total("warm_up_prefixes_total", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Tokens of those prefixes",
            "Tokens by replica since it started.",
            Unit.TOKENS,
            (Target(ENGINES.total("warm_up_tokens_total", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Time spent on them",
            "Seconds by replica by which the warm-up delayed its first request.",
            Unit.SECONDS,
            (Target(ENGINES.total("warm_up_seconds_total", "replica"), "{{replica}}"),),
        ),
    ),
    height=6,
)

ENGINE = Dashboard(
    "raydix-engine",
    "Raydix: Engine",
    "Batches, steps and KV memory of the engine replicas.",
    (APPLICATION, MODEL, REPLICA),
    (_BATCH, _STEPS, _MEMORY, _SPECULATION, _WARM_UP),
)
