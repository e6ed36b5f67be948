"""The outbox of a replica: each request's output until it is delivered, and how much of it was sent.

    tokens   [ t0 t1 t2 t3 t4 t5 ]
               sent ──────▲ num_sent: the next message starts here

An ingress that is slow, away or reconnecting needs no queue of messages: its unsent tokens are one slice. Memory
is bounded by the requests' own lengths, and a late ingress receives everything merged into one delta, or into a
few if one would be too large: streams then take turns, so that a long one does not delay the others.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from msgspec import structs

from deployments.wire import messages
from engine.values.logprobs import TokenLogprobs
from engine.values.stream_delta import StreamDelta

MAX_BATCH_BYTES = 2**20
"""Approximate limit of the bytes of tokens in a message, which an ingress's event loop decodes in one piece."""
_TOKEN_BYTES = 5
"""Bytes of a token id on the wire, at most."""


@dataclass(slots=True)
class StreamLog:
    """One request's output so far, and how much of it was sent."""

    ingress_id: str
    delta: StreamDelta
    num_sent: int = 0
    """Number of tokens sent."""
    prompt_sent: int = 0
    """Position in the prompt up to which its log-probabilities were sent."""
    is_end_sent: bool = False
    timed_at: int = 0
    """Number of tokens when the engine last reported timings."""
    ended_at: float = 0.0
    has_ended: bool = False
    """Whether the request has ended, so that no tokens follow."""
    was_aborted: bool = False
    """Whether the engine was asked to abort it."""
    is_resumable: bool = False
    """Whether it outlives its ingress (`deployments/wire/resumable.py`)."""

    def record(self, later: StreamDelta, now: float) -> None:
        """Append the next delta."""
        if later.logprobs:
            packed = cast(list[TokenLogprobs], messages.encode_each(later.logprobs))
            later = structs.replace(later, logprobs=packed)
        self.delta.add(later)
        if later.timings is not None:
            self.timed_at = self.delta.end
        if later.finish_reason is not None:
            self.ended_at, self.has_ended = now, True

    @property
    def has_unsent(self) -> bool:
        """Whether tokens, log-probabilities or the end are unsent."""
        scores = self.delta.prompt_logprobs
        is_prompt_sent = scores is None or self.prompt_sent >= scores.end
        return self.num_sent < self.delta.end or not is_prompt_sent or self.has_ended != self.is_end_sent

    def unsent(self, max_bytes: int) -> tuple[StreamDelta, int]:
        """Return the unsent output as one delta: all of it, or a part with about `max_bytes` on the wire; and its
        size there.
        """
        unsent = self.delta.since(self.num_sent, self.prompt_sent)
        if not self.has_ended and self.timed_at <= self.num_sent:
            unsent.timings = None
        size = size_of(unsent)
        if size > max_bytes:
            unsent = _beginning(unsent, max_bytes)
            size = size_of(unsent)
        return unsent, size

    def mark_sent(self, sent: StreamDelta) -> None:
        """Record that a delta from `unsent` was sent."""
        scores = sent.prompt_logprobs
        self.num_sent = sent.end
        self.prompt_sent = self.prompt_sent if scores is None else scores.end
        self.is_end_sent = sent.finish_reason is not None

    def rewind(self, num_received: int) -> None:
        """Mark tokens after the first `num_received` as unsent, and prompt log-probabilities if that is 0."""
        self.num_sent = max(0, min(num_received, self.delta.end))
        self.is_end_sent = False
        if not self.num_sent:
            self.prompt_sent = 0


class Outbox:
    """Holds the output of a replica's requests by ingress. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._logs: dict[str, StreamLog] = {}
        self._by_ingress: dict[str, set[str]] = {}
        self._dirty: dict[str, dict[str, None]] = {}  # ingress -> its streams with unsent output, in order
        self._ended: dict[str, None] = {}  # ended streams, in the order of their ends
        self._num_live_of: Counter[str] = Counter()
        self.num_live = 0

    @property
    def num_kept(self) -> int:
        """Number of requests, including those that have ended and may be requested again."""
        return len(self._logs)

    @property
    def is_active(self) -> bool:
        """Whether a request is unfinished, or ended so recently that its ingress may still ask for its output."""
        return bool(self.num_live or self._ended)

    def open(self, request_id: str, ingress_id: str, *, is_resumable: bool = False) -> None:
        """Add a request. Raises ValueError when the id is in use."""
        if request_id in self._logs:
            raise ValueError(f"request id {request_id!r} is already in use")
        self._logs[request_id] = StreamLog(ingress_id, StreamDelta(request_id), is_resumable=is_resumable)
        self._by_ingress.setdefault(ingress_id, set()).add(request_id)
        self._count_live(ingress_id, 1)

    def accept(self, request_id: str) -> None:
        """Make an empty delta report the acceptance of a request, unless it has output, which also reports it."""
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
        """Mark the output that these streams have not received as unsent; return the ids that are unknown here."""
        unknown = []
        for request_id, num_received in received.items():
            log = self._logs.get(request_id)
            if log is None or log.ingress_id != ingress_id:
                unknown.append(request_id)
                continue
            log.rewind(num_received)
            self._touch(ingress_id, request_id)
        return unknown

    def move(self, request_id: str, ingress_id: str) -> str:
        """Send a request's output to this ingress from now on, and all of it again. Return the former ingress."""
        log = self._logs[request_id]
        former = log.ingress_id
        if former != ingress_id:
            self._clean(former, request_id)
            self._disown(former, request_id)
            self._by_ingress.setdefault(ingress_id, set()).add(request_id)
            if not log.has_ended:
                self._count_live(former, -1)
                self._count_live(ingress_id, 1)
            log.ingress_id = ingress_id
        log.rewind(0)
        self._touch(ingress_id, request_id)
        return former

    def log(self, request_id: str) -> StreamLog | None:
        """Return a request's output; None for an unknown one."""
        return self._logs.get(request_id)

    def unsent(self, ingress_id: str, max_bytes: int = MAX_BATCH_BYTES) -> list[StreamDelta]:
        """Return an ingress's unsent output, one delta per stream, up to about `max_bytes` on the wire.

        Call `mark_sent` once it has been sent.
        """
        found: list[StreamDelta] = []
        for request_id in self._dirty.get(ingress_id, ()):
            if max_bytes <= 0:
                break
            delta, size = self._logs[request_id].unsent(max_bytes)
            found.append(delta)
            max_bytes -= size
        return found

    def has_unsent(self, ingress_id: str) -> bool:
        """Return whether there is any output to send to an ingress."""
        return ingress_id in self._dirty

    def mark_sent(self, ingress_id: str, deltas: Iterable[StreamDelta]) -> None:
        """Record that these deltas from `unsent` were sent. A stream with more to send moves behind the others."""
        for delta in deltas:
            self._clean(ingress_id, delta.request_id)
            log = self._logs[delta.request_id]
            log.mark_sent(delta)
            if log.has_unsent:
                self._touch(ingress_id, delta.request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop streams, ended or not."""
        for request_id in request_ids:
            log = self._logs.pop(request_id, None)
            if log is None:
                continue
            if log.has_ended:
                self._ended.pop(request_id, None)
            else:
                self._count_live(log.ingress_id, -1)
            self._clean(log.ingress_id, request_id)
            self._disown(log.ingress_id, request_id)

    def ended_before(self, deadline: float) -> list[str]:
        """Return the streams that ended before `deadline`, except those that were `retired`. O(their number)."""
        return list(itertools.takewhile(lambda id_: self._logs[id_].ended_at < deadline, self._ended))

    def retire(self, request_id: str) -> None:
        """Have `ended_before` omit an ended stream."""
        self._ended.pop(request_id, None)

    def live_of(self, ingress_id: str) -> list[str]:
        """Return the unfinished requests of an ingress."""
        return [id_ for id_ in self._by_ingress.get(ingress_id, ()) if not self._logs[id_].has_ended]

    def take_unaborted(self, ingress_id: str) -> list[str]:
        """Return the unfinished requests of an ingress that were not returned before, for the engine to abort;
        without resumable ones.

        It removes them from its inbox only between steps, so each is requested once.
        """
        found = [
            id_
            for id_ in self.live_of(ingress_id)
            if not (self._logs[id_].was_aborted or self._logs[id_].is_resumable)
        ]
        for request_id in found:
            self._logs[request_id].was_aborted = True
        return found

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

    def _disown(self, ingress_id: str, request_id: str) -> None:
        ids = self._by_ingress[ingress_id]
        ids.discard(request_id)
        if not ids:
            del self._by_ingress[ingress_id]

    def _count_live(self, ingress_id: str, change: int) -> None:
        self.num_live += change
        self._num_live_of[ingress_id] += change
        if not self._num_live_of[ingress_id]:
            del self._num_live_of[ingress_id]

    def _touch(self, ingress_id: str, request_id: str) -> None:
        self._dirty.setdefault(ingress_id, {})[request_id] = None

    def _clean(self, ingress_id: str, request_id: str) -> None:
        dirty = self._dirty.get(ingress_id)
        if dirty is not None:
            dirty.pop(request_id, None)
            if not dirty:
                del self._dirty[ingress_id]


def size_of(delta: StreamDelta) -> int:
    """Return about how many bytes a delta takes on the wire, rather too many than too few."""
    size = len(delta.request_id) + len(delta.token_ids) * _TOKEN_BYTES
    if delta.logprobs is not None:
        size += sum(map(len, cast(list[bytes], delta.logprobs)))
    if delta.prompt_logprobs is not None:
        size += len(delta.prompt_logprobs.records)
    if delta.pooled is not None:
        size += len(delta.pooled)
    if delta.alternatives is not None:
        size += sum(len(found.token_ids) for found in delta.alternatives) * _TOKEN_BYTES
    return size


def _beginning(delta: StreamDelta, max_bytes: int) -> StreamDelta:
    """Return the part of a delta that has about `max_bytes`, at least one token or one record of its prompt.

    An end comes with the last token, and a search's only delta cannot be divided.
    """
    scores = delta.prompt_logprobs
    if scores is not None and len(scores.records) > max_bytes:
        return StreamDelta(
            delta.request_id, [], delta.start, delta.num_cached, prompt_logprobs=scores.beginning(max_bytes)
        )
    room = max_bytes - (0 if scores is None else len(scores.records))
    sizes = [_TOKEN_BYTES] * len(delta.token_ids)
    if delta.logprobs is not None:
        sizes = [_TOKEN_BYTES + len(packed) for packed in cast(list[bytes], delta.logprobs)]
    count = max(1, bisect_right(list(itertools.accumulate(sizes)), room))
    if delta.alternatives is not None or count >= len(delta.token_ids):
        return delta
    return StreamDelta(
        delta.request_id,
        delta.token_ids[:count],
        delta.start,
        delta.num_cached,
        None,
        delta.timings,
        None if delta.logprobs is None else delta.logprobs[:count],
        None,
        scores,
    )
