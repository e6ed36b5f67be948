"""The timeline of a stream through replicas, the source of `timings`, the request log and traces.

    asked_at ── waits here ──▶ sent_at ─▶ span at r0 ── lost ─▶ span at r1 ─▶ end
                                          route | queue | prefill | decode

All clocks are `time.monotonic` of the ingress's process. An engine reports only durations, so clocks of different
machines are never compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.values.stream_delta import StreamDelta, Timings


@dataclass(slots=True)
class ReplicaSpan:
    """One replica's part of a stream. A replica that sent no token has no span."""

    replica: str
    sent_at: float
    first_at: float
    """Clock when its first token (or the end) arrived."""
    last_at: float
    """Clock when its latest token arrived."""
    timings: Timings | None = None
    """The last timings that its engine reported."""
    has_ended: bool = False
    """Whether the engine reported the end of the stream."""

    def feed(self, delta: StreamDelta, now: float) -> None:
        """Record the times of a delta from the replica."""
        self.last_at = now
        self.timings = delta.timings or self.timings
        self.has_ended = delta.finish_reason is not None

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last, by the engine, or by this process if that reported no end."""
        if self.has_ended and self.timings is not None:
            return self.timings.decode
        return self.last_at - self.first_at

    def phases(self) -> list[tuple[str, float, float]]:
        """Return (name, start, end) by the local clock: the engine's durations, counted back from `last_at`."""
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
    """The loss of a stream's replica after its first token."""

    at: float
    """Clock when the replica was lost."""
    replica: str | None
    """The replica that was lost."""
    reason: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Replicas that ran one stream, and when."""

    asked_at: float
    """Clock when the stream was requested."""
    sent_at: float
    """Clock when its wait in this process ended."""
    spans: list[ReplicaSpan] = field(default_factory=list)
    migrations: list[Migration] = field(default_factory=list)
