"""How long the parts of a step take on its device: prepare | forward | sample."""

from __future__ import annotations

import time

import torch


class StageClock:
    """Times one step from its construction on; see `StepResult` for what it measures.

    A GPU computes on while its host goes ahead, so there the forward pass is timed by events in its stream. They
    are read after sampling, which waits for the device in any case: nothing here waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._began = time.perf_counter()
        self._forward_at = self._sample_at = self._began
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def begin_forward(self) -> None:
        """All is prepared; the model comes next."""
        self._forward_at = time.perf_counter()
        if self._events is not None:
            self._events[0].record()

    def begin_sampling(self) -> None:
        """The logits are there, or on their way."""
        self._sample_at = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    @property
    def prepare_seconds(self) -> float:
        """Of the host, until the forward pass began."""
        return self._forward_at - self._began

    def sample_seconds(self) -> float:
        """Since the forward pass ended. Call it when the sampled tokens are on the host."""
        sampled_at = time.perf_counter()
        if self._events is None:
            return sampled_at - self._sample_at
        begin, end = self._events
        forward = float(begin.elapsed_time(end)) / 1e3
        return max(sampled_at - self._forward_at - forward, 0.0)
