"""Figures of a pipeline: how long its stages are idle, and what its links carry.

burst of m steps     s0 │ 0 1 2 3 · · ·          (stages - 1) / m more time than the steps of one stage,
                     s1 │ · 0 1 2 3 · ·          while the pipeline fills and empties
steady, m >= stages  s0 │ 0 1 2 3 0 1 2 3        none, if the links hide behind the computation
                     s1 │ 3 0 1 2 3 0 1 2
"""

from __future__ import annotations

from dataclasses import dataclass

from deployments.simulator.planning.load import RequestShape
from deployments.simulator.planning.replica import ReplicaPlan


@dataclass(frozen=True, slots=True, order=True)
class LinkUse:
    """Traffic on a link, such as that from one stage to the next."""

    gb_per_s: float
    """1e9 bytes per second that the slowest stage would send."""
    share: float
    """Share of the link's speed; above 1, the link is the limit."""

    @classmethod
    def of(cls, num_bytes: float, seconds: float, link_gb_s: float) -> LinkUse:
        """Return the use of a link over which so many bytes go in each `seconds`."""
        sent = num_bytes / seconds / 1e9
        return cls(sent, sent / link_gb_s)


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """Figures of one replica with several stages."""

    micro_batches: int
    burst_bubble: float
    """Additional time of a burst of as many steps, as a share of the time without."""
    idle_share: float
    """Share of the time in which the slowest stage waits, while requests decode steadily."""
    decode: LinkUse
    prefill: LinkUse


def pipeline_figures(replica: ReplicaPlan, num_running: int, request: RequestShape) -> PipelineFigures | None:
    """Return the figures with `num_running` requests that decode; None if there is one stage."""
    num_stages, num_batches = len(replica.stages), replica.engine.num_micro_batches
    if num_stages == 1:
        return None
    rows = replica.rows_of(num_running)
    step_s = replica.slowest_step_s(rows, request.context)
    busy_s = num_running / rows * step_s
    prompt = request.prompt_tokens, request.uncached_tokens
    prefill_s = max(replica.prefill_token_s(stage, *prompt) for stage in replica.stages)
    return PipelineFigures(
        num_batches,
        (num_stages - 1) / num_batches,
        1 - busy_s / replica.decode_step_s(num_running, request.context),
        _use(replica, rows, step_s),
        _use(replica, 1, prefill_s),
    )


def _use(replica: ReplicaPlan, num_tokens: float, seconds: float) -> LinkUse:
    """Return the use of a link over which the hidden states of so many tokens go in each `seconds`."""
    return LinkUse.of(num_tokens * replica.link_bytes_per_token, seconds, replica.assumed.link_gb_s)
