"""Measures how long the parts of a step take on its device: prepare | forward | sample."""

from __future__ import annotations

import time

import torch


class StageClock:
    """Times one step from its construction on; `StepResult` describes the times.

    Because a GPU runs behind its host, events in its stream time the forward pass. They are read after sampling,
    which waits for the device anyway, so that nothing waits here.
    """

    def __init__(self, device: torch.device) -> None:
        self._began = time.perf_counter()
        self._forward_at = self._sample_at = self._began
        self._device = device
        self._events: list[torch.cuda.Event] | None = None
        self._is_ended = False
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]

    def begin_forward(self) -> None:
        """Mark the beginning of the forward pass."""
        self._forward_at = time.perf_counter()
        if self._events is not None:
            self._events[0].record(torch.cuda.current_stream(self._device))

    def begin_sampling(self) -> None:
        """Mark the beginning of sampling: the forward pass is computed or queued."""
        self._sample_at = time.perf_counter()
        if self._events is not None:
            self._events[1].record(torch.cuda.current_stream(self._device))

    def end_sampling(self) -> None:
        """Mark the end of sampling in steps whose tokens are read later, when other steps may already run."""
        self._is_ended = True
        if self._events is not None:
            self._events[2].record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait for all queued work of the device, in a step that samples nothing."""
        if self._events is not None:
            torch.cuda.current_stream(self._device).synchronize()

    @property
    def prepare_seconds(self) -> float:
        """Seconds on the host until the forward pass began."""
        return self._forward_at - self._began

    def sample_seconds(self) -> float:
        """Return the seconds since the forward pass ended. Call it when the sampled tokens are on the host."""
        sampled_at = time.perf_counter()
        if self._events is None:
            return sampled_at - self._sample_at
        begin, end, sampled = self._events
        if self._is_ended:
            return float(end.elapsed_time(sampled)) / 1e3
        forward = float(begin.elapsed_time(end)) / 1e3
        return max(sampled_at - self._forward_at - forward, 0.0)
