"""What a replica keeps of its requests' output until it is delivered: the tokens, and how many were sent.

    tokens   [ t0 t1 t2 t3 t4 t5 ]
               sent ──────▲ num_sent: the next message starts here

An ingress that is slow, away or reconnecting needs no queue of messages: what it has not got is one slice. Memory
is bounded by the requests' own lengths, and a late ingress gets everything merged into one output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from msgspec import structs

from deployments.wire import messages
from engine.logprobs import TokenLogprobs
from engine.stream_delta import StreamDelta


@dataclass(slots=True)
class StreamLog:
    """One request's output: all that its stream gained so far, and how much of that was sent."""

    ingress_id: str
    delta: StreamDelta
    num_sent: int = 0
    """Tokens that were sent."""
    prompt_sent: int = 0
    """Position in the prompt up to which its log-probabilities were sent."""
    timed_at: int = 0
    """How many tokens there were when the engine last told timings."""
    ended_at: float = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the last of its tokens is there."""
        return self.delta.finish_reason is not None

    def record(self, later: StreamDelta, now: float) -> None:
        """Take in the delta that follows."""
        if later.logprobs:
            packed = cast(list[TokenLogprobs], messages.encode_each(later.logprobs))
            later = structs.replace(later, logprobs=packed)
        self.delta.add(later)
        if later.timings is not None:
            self.timed_at = self.delta.end
        if later.finish_reason is not None:
            self.ended_at = now

    def unsent(self) -> StreamDelta:
        """Everything that was not sent."""
        unsent = self.delta.since(self.num_sent, self.prompt_sent)
        if not self.has_ended and self.timed_at <= self.num_sent:
            unsent.timings = None
        return unsent

    def mark_sent(self) -> None:
        """Everything was sent."""
        scores = self.delta.prompt_logprobs
        self.num_sent = self.delta.end
        self.prompt_sent = 0 if scores is None else scores.end

    def rewind(self, num_received: int) -> None:
        """Only so many tokens arrived. A prompt's log-probabilities have if any token has."""
        self.num_sent = max(0, min(num_received, self.delta.end))
        if not self.num_sent:
            self.prompt_sent = 0


class Outbox:
    """All requests of a replica by ingress. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._logs: dict[str, StreamLog] = {}
        self._by_ingress: dict[str, set[str]] = {}
        self._dirty: dict[str, dict[str, None]] = {}  # ingress -> its streams with something to send, in order
        self._num_live_of: Counter[str] = Counter()
        self.num_live = 0

    def open(self, request_id: str, ingress_id: str) -> None:
        """A request was accepted: its first delta says just that. Raises ValueError when the id is in use."""
        if request_id in self._logs:
            raise ValueError(f"request id {request_id!r} is already in use")
        self._logs[request_id] = StreamLog(ingress_id, StreamDelta(request_id))
        self._by_ingress.setdefault(ingress_id, set()).add(request_id)
        self._touch(ingress_id, request_id)
        self._count_live(ingress_id, 1)

    def record(self, delta: StreamDelta, now: float) -> str | None:
        """Take in what an engine's step brought; the ingress it is for, None when nobody waits for it."""
        log = self._logs.get(delta.request_id)
        if log is None or log.has_ended:
            return None
        log.record(delta, now)
        if log.has_ended:
            self._count_live(log.ingress_id, -1)
        self._touch(log.ingress_id, delta.request_id)
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

    def unsent(self, ingress_id: str) -> list[StreamDelta]:
        """What an ingress has not been sent, one delta per stream. Call `mark_sent` when it is on its way."""
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
            if not log.has_ended:
                self._count_live(log.ingress_id, -1)
            ids = self._by_ingress[log.ingress_id]
            ids.discard(request_id)
            if not ids:
                del self._by_ingress[log.ingress_id]

    def ended_before(self, deadline: float) -> list[str]:
        """Streams that ended before `deadline`: delivered long ago, or nobody wants them."""
        return [id_ for id_, log in self._logs.items() if log.has_ended and log.ended_at < deadline]

    def live_of(self, ingress_id: str) -> list[str]:
        """Unfinished requests of an ingress."""
        return [id_ for id_ in self._by_ingress.get(ingress_id, ()) if not self._logs[id_].has_ended]

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
