"""The outbox of a replica: each request's output until it is delivered, and how much of it was sent.

    tokens   [ t0 t1 t2 t3 t4 t5 ]
               sent ──────▲ num_sent: the next message starts here

An ingress that is slow, away or reconnecting needs no queue of messages: its unsent tokens are one slice. Memory
is bounded by the requests' own lengths, and a late ingress gets everything merged into one delta.
"""

from __future__ import annotations

import itertools
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
    """One request's output so far, and how much of it was sent."""

    ingress_id: str
    delta: StreamDelta
    num_sent: int = 0
    """Number of tokens sent."""
    prompt_sent: int = 0
    """Position in the prompt up to which its log-probabilities were sent."""
    timed_at: int = 0
    """Number of tokens when the engine last reported timings."""
    ended_at: float = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the request has ended, so that no tokens follow."""
        return self.delta.finish_reason is not None

    def record(self, later: StreamDelta, now: float) -> None:
        """Append the next delta."""
        if later.logprobs:
            packed = cast(list[TokenLogprobs], messages.encode_each(later.logprobs))
            later = structs.replace(later, logprobs=packed)
        self.delta.add(later)
        if later.timings is not None:
            self.timed_at = self.delta.end
        if later.finish_reason is not None:
            self.ended_at = now

    def unsent(self) -> StreamDelta:
        """Return everything that was not sent, as one delta."""
        unsent = self.delta.since(self.num_sent, self.prompt_sent)
        if not self.has_ended and self.timed_at <= self.num_sent:
            unsent.timings = None
        return unsent

    def mark_sent(self) -> None:
        """Record that everything was sent."""
        scores = self.delta.prompt_logprobs
        self.num_sent = self.delta.end
        self.prompt_sent = 0 if scores is None else scores.end

    def rewind(self, num_received: int) -> None:
        """Mark tokens after the first `num_received` as unsent, and prompt log-probabilities if that is 0."""
        self.num_sent = max(0, min(num_received, self.delta.end))
        if not self.num_sent:
            self.prompt_sent = 0


class Outbox:
    """Holds the output of a replica's requests by ingress. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._logs: dict[str, StreamLog] = {}
        self._by_ingress: dict[str, set[str]] = {}
        self._dirty: dict[str, dict[str, None]] = {}  # ingress -> its streams with something to send, in order
        self._ended: dict[str, None] = {}  # ended streams, in the order of their ends
        self._num_live_of: Counter[str] = Counter()
        self.num_live = 0

    def open(self, request_id: str, ingress_id: str) -> None:
        """Add a request. Raises ValueError when the id is in use."""
        if request_id in self._logs:
            raise ValueError(f"request id {request_id!r} is already in use")
        self._logs[request_id] = StreamLog(ingress_id, StreamDelta(request_id))
        self._by_ingress.setdefault(ingress_id, set()).add(request_id)
        self._count_live(ingress_id, 1)

    def accept(self, request_id: str) -> None:
        """Have an empty delta tell that the request was accepted, unless it has output, which tells as much."""
        log = self._logs.get(request_id)
        if log is not None and log.delta.is_empty:
            self._touch(log.ingress_id, request_id)

    def record(self, delta: StreamDelta, now: float) -> str | None:
        """Append an engine's delta; return its ingress, or None when the request is unknown or has ended."""
        log = self._logs.get(delta.request_id)
        if log is None or log.has_ended:
            return None
        log.record(delta, now)
        if log.has_ended:
            self._count_live(log.ingress_id, -1)
            self._ended[delta.request_id] = None
        self._touch(log.ingress_id, delta.request_id)
        return log.ingress_id

    def resume(self, ingress_id: str, received: Mapping[str, int]) -> list[str]:
        """Mark what these streams have not received as unsent; return the ids that are unknown here."""
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
        """Return an ingress's unsent output, one delta per stream. Call `mark_sent` once it has been sent."""
        return [self._logs[id_].unsent() for id_ in self._dirty.get(ingress_id, ()) if id_ in self._logs]

    def mark_sent(self, ingress_id: str) -> None:
        """Record that all deltas from `unsent` were sent."""
        for request_id in self._dirty.pop(ingress_id, ()):
            if request_id in self._logs:
                self._logs[request_id].mark_sent()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop streams, ended or not."""
        for request_id in request_ids:
            log = self._logs.pop(request_id, None)
            if log is None:
                continue
            if log.has_ended:
                del self._ended[request_id]
            else:
                self._count_live(log.ingress_id, -1)
            ids = self._by_ingress[log.ingress_id]
            ids.discard(request_id)
            if not ids:
                del self._by_ingress[log.ingress_id]

    def ended_before(self, deadline: float) -> list[str]:
        """Return the streams that ended before `deadline`, which need not be kept any longer. O(their number)."""
        return list(itertools.takewhile(lambda id_: self._logs[id_].ended_at < deadline, self._ended))

    def live_of(self, ingress_id: str) -> list[str]:
        """Return the unfinished requests of an ingress."""
        return [id_ for id_ in self._by_ingress.get(ingress_id, ()) if not self._logs[id_].has_ended]

    def num_live_of(self, ingress_id: str) -> int:
        """Return the number of unfinished requests of an ingress."""
        return self._num_live_of[ingress_id]

    def is_known(self, request_id: str) -> bool:
        """Return whether the request was opened here and not forgotten."""
        return request_id in self._logs

    def is_beginning(self, request_id: str, num_tokens: int) -> bool:
        """Return whether a request is unfinished and has fewer than `num_tokens` tokens."""
        log = self._logs.get(request_id)
        return log is not None and not log.has_ended and log.delta.end < num_tokens

    def owns(self, ingress_id: str, request_id: str) -> bool:
        """Return whether the request came from that ingress."""
        return request_id in self._by_ingress.get(ingress_id, ())

    def ingresses(self) -> set[str]:
        """Return the ingresses that have streams here."""
        return set(self._by_ingress)

    def _count_live(self, ingress_id: str, change: int) -> None:
        self.num_live += change
        self._num_live_of[ingress_id] += change
        if not self._num_live_of[ingress_id]:
            del self._num_live_of[ingress_id]

    def _touch(self, ingress_id: str, request_id: str) -> None:
        self._dirty.setdefault(ingress_id, {})[request_id] = None
