"""Measures how long the parts of a step take on its device: prepare | forward | sample."""

from __future__ import annotations

import time

import torch


class StageClock:
    """Times one step from its construction on; `StepResult` describes the times.

    Because a GPU runs behind its host, events in its stream time sampling. They are read when the tokens are on
    the host, so that nothing waits here.
    """

    def __init__(self, device: torch.device) -> None:
        self._began = time.perf_counter()
        self._forward_at = self._began
        self._sample_at: float | None = None
        self._device = device
        self._events: list[torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def begin_forward(self) -> None:
        """Mark the beginning of the forward pass."""
        self._forward_at = time.perf_counter()

    def begin_sampling(self) -> None:
        """Mark the beginning of sampling: the forward pass is computed or queued."""
        self._sample_at = time.perf_counter()
        self._record(0)

    def end_sampling(self) -> None:
        """Mark the end of sampling. The tokens are read later, when other steps may already run."""
        self._record(1)

    def _record(self, at: int) -> None:
        if self._events is not None:
            self._events[at].record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait for all queued work of the device, in a step without tokens."""
        if self._events is not None:
            torch.cuda.current_stream(self._device).synchronize()

    @property
    def prepare_seconds(self) -> float:
        """Seconds on the host until the forward pass began."""
        return self._forward_at - self._began

    def sample_seconds(self) -> float:
        """Return the seconds since the forward pass ended, 0 in a step that samples nothing. Call it when the
        sampled tokens are on the host.
        """
        if self._sample_at is None:
            return 0.0
        if self._events is None:
            return time.perf_counter() - self._sample_at
        begin, end = self._events
        return float(begin.elapsed_time(end)) / 1e3
