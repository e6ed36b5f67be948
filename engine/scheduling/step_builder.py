"""Collects the parts of a step while it is planned."""

from __future__ import annotations

from cache import PageCopy
from engine.host_tier.host_pool import Copies
from engine.values.plan import Chunk, StepPlan
from engine.values.request import Request
from engine.values.stream_delta import StreamDelta


class StepBuilder:
    """The parts of a plan that is not finished yet."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.pooled: list[Chunk] = []
        self.copies: list[PageCopy] = []
        self.prompts: list[Request] = []
        """Running requests with more than one token to compute."""
        self.deferrable: list[Request] = []
        """Running deferrable requests with one token to compute."""
        self.preempted: list[Request] = []
        self.to_host, self.from_host = Copies([], []), Copies([], [])

    def build(self, ended: list[StreamDelta]) -> StepPlan:
        """Return the finished plan. `ended` are the last deltas of requests that ended without a step."""
        return StepPlan(
            tuple(self.chunks),
            tuple(self.copies),
            tuple(self.to_host.pages),
            tuple(self.from_host.pages),
            tuple(self.preempted),
            tuple(ended),
            tuple(self.pooled),
            tuple(self.to_host.states),
            tuple(self.from_host.states),
        )
