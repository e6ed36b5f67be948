"""A stream's way through replicas, with times: `timings`, the request log and traces are made of it.

    asked_at ── waits here ──▶ sent_at ─▶ span at r0 ── lost ─▶ span at r1 ─▶ end
                                          route | queue | prefill | decode

All clocks are `time.monotonic` of the ingress's process. An engine tells durations of what happened inside it:
clocks of different machines are never compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.stream_delta import StreamDelta, Timings


@dataclass(slots=True)
class ReplicaSpan:
    """What one replica did for a stream, from its first token on: a replica that brought none has no span."""

    replica: str
    sent_at: float
    first_at: float
    """Clock when its first token (or the end) came."""
    last_at: float
    """Clock when its latest token came."""
    timings: Timings | None = None
    """What its engine told last."""
    has_ended: bool = False
    """Whether the engine said that it was the end."""

    def feed(self, delta: StreamDelta, now: float) -> None:
        """Take note of a delta that came from the replica."""
        self.last_at = now
        self.timings = delta.timings or self.timings
        self.has_ended = delta.finish_reason is not None

    @property
    def decode_s(self) -> float:
        """From the first token to the last: as the engine measured it, or here if it could not say the end."""
        if self.has_ended and self.timings is not None:
            return self.timings.decode
        return self.last_at - self.first_at

    def phases(self) -> list[tuple[str, float, float]]:
        """(name, start, end) on the clock here: what the engine measured, laid out backwards from `last_at`."""
        decode_at = self.last_at - self.decode_s
        if self.timings is None:
            return [("route", self.sent_at, self.first_at), ("decode", decode_at, self.last_at)]
        prefill_at = max(self.sent_at, decode_at - self.timings.prefill)
        queue_at = max(self.sent_at, prefill_at - self.timings.queue)
        return [
            ("route", self.sent_at, queue_at),
            ("queue", queue_at, prefill_at),
            ("prefill", prefill_at, decode_at),
            ("decode", decode_at, self.last_at),
        ]


@dataclass(frozen=True, slots=True)
class Migration:
    """A stream lost its replica after its first token."""

    at: float
    """Clock."""
    replica: str | None
    """The replica that was lost."""
    reason: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where one stream was, and when."""

    asked_at: float
    """Clock when the stream was asked for."""
    sent_at: float
    """Clock when it no longer waited in this process."""
    spans: list[ReplicaSpan] = field(default_factory=list)
    migrations: list[Migration] = field(default_factory=list)
