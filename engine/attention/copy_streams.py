"""Streams on which a device copies while its steps run, and the order between them.

    steps   ── gather ─┬───── step ─────────────────── scatter ── step
    out                └─▶ device to host                 ▲
    in      ──────────────────── host to device ──────────┘

One stream records an event, and another waits for it. On a CPU everything happens in order anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch

StreamName = Literal["steps", "out", "in"]


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Make the host wait until the device has passed it."""


class CopyStreams(Protocol):
    """The streams of one device, for the thread that runs its steps."""

    def on(self, name: StreamName) -> AbstractContextManager[object]:
        """Launch the work inside the context on this stream."""

    def record(self, name: StreamName) -> Event:
        """Return the point after all work launched on this stream so far."""

    def wait(self, name: StreamName, event: Event) -> None:
        """Make all later work of this stream wait for the event; the host does not wait."""


class CudaStreams:
    """The streams of a GPU. Steps run on the thread's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {"out": torch.cuda.Stream(device), "in": torch.cuda.Stream(device)}

    def on(self, name: StreamName) -> AbstractContextManager[object]:
        """Implement `CopyStreams`."""
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream(name))
        return context

    def record(self, name: StreamName) -> torch.cuda.Event:
        """Implement `CopyStreams`."""
        event = torch.cuda.Event()
        event.record(self._stream(name))
        return event

    def wait(self, name: StreamName, event: Event) -> None:
        """Implement `CopyStreams`."""
        assert isinstance(event, torch.cuda.Event)
        self._stream(name).wait_event(event)

    def _stream(self, name: StreamName) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if name == "steps" else self._streams[name]


class _Done:
    def synchronize(self) -> None:
        """Implement `Event`."""


class InOrder:
    """Implements `CopyStreams` for a CPU."""

    def on(self, name: StreamName) -> AbstractContextManager[object]:
        """Implement `CopyStreams`."""
        return nullcontext()

    def record(self, name: StreamName) -> Event:
        """Implement `CopyStreams`."""
        return _Done()

    def wait(self, name: StreamName, event: Event) -> None:
        """Implement `CopyStreams`."""


def streams_of(device: torch.device) -> CopyStreams:
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else InOrder()


def fence(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for all work that this thread has launched on the device's stream of steps."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
