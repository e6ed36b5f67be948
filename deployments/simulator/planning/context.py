"""Figures of context parallelism: what GPUs with the same key-value heads receive from each other."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.simulator.planning.load import RequestShape
from deployments.simulator.planning.pipeline import LinkUse
from deployments.simulator.planning.replica import ReplicaPlan


@dataclass(frozen=True, slots=True)
class ContextFigures:
    """Figures of one replica whose GPUs divide the KV of requests: traffic of a GPU, in the stage with most."""

    parts: int
    decode: LinkUse
    """Its share of the speed is also the share of a decode step's time."""
    prefill: LinkUse
    is_prefill_hidden: bool
    """Whether KV is passed while attention computes; otherwise queries are sent, for which attention waits."""


def context_figures(replica: ReplicaPlan, num_running: int, request: RequestShape) -> ContextFigures | None:
    """Return the figures with `num_running` requests that decode; None if KV is not divided."""
    if replica.cp == 1:
        return None
    rows, prompt = replica.rows_of(num_running), (request.prompt_tokens, request.uncached_tokens)
    traffic = [(stage, replica.prompt_traffic(stage, *prompt)) for stage in replica.stages]

    def use(num_bytes: float, seconds: float) -> LinkUse:
        return LinkUse.of(num_bytes / replica.tp, seconds, replica.peer_gb_s)

    return ContextFigures(
        replica.cp,
        max(
            use(rows * stage.query_bytes, replica.stage_step_s(stage, rows, request.context))
            for stage in replica.stages
        ),
        max(use(each.num_bytes, replica.prefill_token_s(stage, *prompt)) for stage, each in traffic),
        all(each.is_hidden for _, each in traffic),
    )
