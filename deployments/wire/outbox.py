"""What a replica keeps of its requests' output until it is delivered: the tokens, and how many were sent.

    tokens   [ t0 t1 t2 t3 t4 t5 ]
               sent ──────▲ num_sent: the next message starts here

An ingress that is slow, away or reconnecting needs no queue of messages: what it has not got is one slice. Memory
is bounded by the requests' own lengths, and a late ingress gets everything merged into one output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from msgspec import Raw

from deployments.wire.messages import Logprob, Output, encode_logprobs, to_timings
from engine.logprobs import PackedLogprobs, joined
from engine.stream_delta import StreamDelta, Timings


@dataclass(slots=True)
class StreamLog:
    """The output of one request."""

    request_id: str
    ingress_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Raw] = field(default_factory=list)
    """Of the tokens, when asked for, as the wire has them."""
    prompt_logprobs: PackedLogprobs | None = None
    num_sent: int = 0
    prompt_sent: int = 0
    """Position in the prompt up to which its log-probabilities were sent."""
    num_cached: int = 0
    timings: Timings | None = None
    """The latest, told after so many tokens: `timed_at`."""
    timed_at: int = 0
    end: StreamDelta | None = None
    """The event that ended it."""
    ended_at: float = 0.0

    def unsent(self) -> Output:
        """Everything from `num_sent` on as one output."""
        start, end = self.num_sent, self.end
        scores = None if self.prompt_logprobs is None else self.prompt_logprobs.since(self.prompt_sent)
        return Output(
            self.request_id,
            start,
            self.tokens[start:],
            self.num_cached,
            None if end is None else end.finish_reason,
            cast(Sequence[Logprob], self.logprobs[start:]),
            None if end is None else end.error,
            to_timings(self.timings) if end is not None or self.timed_at > start else None,
            scores,
            () if end is None else end.alternatives,
        )

    def mark_sent(self) -> None:
        """Everything was."""
        self.num_sent = len(self.tokens)
        self.prompt_sent = 0 if self.prompt_logprobs is None else self.prompt_logprobs.end

    def rewind(self, num_received: int) -> None:
        """Only so many tokens arrived. A prompt's log-probabilities have if any token has."""
        self.num_sent = max(0, min(num_received, len(self.tokens)))
        if not self.num_sent:
            self.prompt_sent = 0


class StreamLogs:
    """All requests of a replica by ingress. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._logs: dict[str, StreamLog] = {}
        self._by_ingress: dict[str, set[str]] = {}
        self._dirty: dict[str, dict[str, None]] = {}  # ingress -> its streams with something to send, in order
        self._num_live_of: Counter[str] = Counter()
        self.num_live = 0

    def open(self, request_id: str, ingress_id: str) -> None:
        """A request was accepted: its first output says just that. Raises ValueError when the id is in use."""
        if request_id in self._logs:
            raise ValueError(f"request id {request_id!r} is already in use")
        self._logs[request_id] = StreamLog(request_id, ingress_id)
        self._by_ingress.setdefault(ingress_id, set()).add(request_id)
        self._touch(ingress_id, request_id)
        self._count_live(ingress_id, 1)

    def record(self, event: StreamDelta, now: float) -> str | None:
        """Take in an engine event; the ingress it is for, None when nobody waits for it."""
        log = self._logs.get(event.request_id)
        if log is None or log.end is not None:
            return None
        log.tokens += event.token_ids
        if event.logprobs:
            log.logprobs += encode_logprobs(event.logprobs)
        if event.prompt_logprobs is not None:
            log.prompt_logprobs = joined(log.prompt_logprobs, event.prompt_logprobs)
        log.num_cached = event.num_cached
        if event.timings is not None:
            log.timings, log.timed_at = event.timings, len(log.tokens)
        if event.finish_reason is not None:
            log.end, log.ended_at = event, now
            self._count_live(log.ingress_id, -1)
        self._touch(log.ingress_id, event.request_id)
        return log.ingress_id

    def resume(self, ingress_id: str, received: Mapping[str, int]) -> list[str]:
        """Send these streams again from what was received; returns the ids that are not known here."""
        unknown = []
        for request_id, num_received in received.items():
            log = self._logs.get(request_id)
            if log is None or log.ingress_id != ingress_id:
                unknown.append(request_id)
                continue
            log.rewind(num_received)
            self._touch(ingress_id, request_id)
        return unknown

    def unsent(self, ingress_id: str) -> list[Output]:
        """What an ingress has not been sent, one output per stream. Call `mark_sent` when it is on its way."""
        return [self._logs[id_].unsent() for id_ in self._dirty.get(ingress_id, ()) if id_ in self._logs]

    def mark_sent(self, ingress_id: str) -> None:
        """All that `unsent` returned was sent."""
        for request_id in self._dirty.pop(ingress_id, ()):
            if request_id in self._logs:
                self._logs[request_id].mark_sent()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop streams whatever their state."""
        for request_id in request_ids:
            log = self._logs.pop(request_id, None)
            if log is None:
                continue
            if log.end is None:
                self._count_live(log.ingress_id, -1)
            ids = self._by_ingress[log.ingress_id]
            ids.discard(request_id)
            if not ids:
                del self._by_ingress[log.ingress_id]

    def ended_before(self, deadline: float) -> list[str]:
        """Streams that ended before `deadline`: delivered long ago, or nobody wants them."""
        return [id_ for id_, log in self._logs.items() if log.end is not None and log.ended_at < deadline]

    def live_of(self, ingress_id: str) -> list[str]:
        """Unfinished requests of an ingress."""
        return [id_ for id_ in self._by_ingress.get(ingress_id, ()) if self._logs[id_].end is None]

    def num_live_of(self, ingress_id: str) -> int:
        """How many unfinished requests an ingress has here."""
        return self._num_live_of[ingress_id]

    def is_known(self, request_id: str) -> bool:
        """Whether the request was opened here and not forgotten."""
        return request_id in self._logs

    def owns(self, ingress_id: str, request_id: str) -> bool:
        """Whether the request came from that ingress."""
        return request_id in self._by_ingress.get(ingress_id, ())

    def ingresses(self) -> set[str]:
        """Ingresses with streams here."""
        return set(self._by_ingress)

    def _count_live(self, ingress_id: str, change: int) -> None:
        self.num_live += change
        self._num_live_of[ingress_id] += change
        if not self._num_live_of[ingress_id]:
            del self._num_live_of[ingress_id]

    def _touch(self, ingress_id: str, request_id: str) -> None:
        self._dirty.setdefault(ingress_id, {})[request_id] = None
