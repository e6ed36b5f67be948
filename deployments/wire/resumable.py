"""The resumable streams of a replica: how to find them, and how long they are kept without a reader.

    read ── Detach, or its ingress is absent ──▶ detached ── `detached_s` ──▶ aborted
      ▲                                             │                           │
      └────────────────── TakeOver ─────────────────┴───────────────────────────┘
    ended ── `keep_s` after its end, or after its reader left ──▶ forgotten

Their tokens are in the outbox. A tenant's streams without a reader are bounded in number and bytes: the one whose
reader left first is forgotten first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from deployments.config.settings import StreamSettings
from deployments.wire.messages import Generate, ResumableStream, StreamPart
from deployments.wire.outbox import Outbox, StreamLog, size_of

LOOK_S = 0.25
"""Seconds between two looks for streams to be aborted or forgotten."""
NO_INGRESS = ""
"""The ingress of requests without a reader."""


@dataclass(slots=True)
class _Kept:
    """One request of a resumable stream."""

    stream: ResumableStream
    output_ids: bytes
    num_prompt_reported: int
    left_at: float | None = None
    """Clock when its reader left, or when it ended; None before that."""
    num_bytes: int = 0
    """Its size since then."""


class ResumableStreams:
    """Keeps the resumable requests in an outbox. Not thread-safe: its owner holds a lock."""

    def __init__(self, outbox: Outbox, settings: StreamSettings, abort: Callable[[str], None]) -> None:
        """`abort` has the engine abort a request."""
        self._outbox, self._settings, self._abort = outbox, settings, abort
        self._looked_at = 0.0
        self._kept: dict[str, _Kept] = {}
        self._names: dict[str, dict[str, None]] = {}  # stream -> its requests
        self._left: dict[str, dict[str, None]] = {}  # tenant -> its requests without a reader, in order of leaving

    def open(self, request: Generate, stream: ResumableStream) -> None:
        """Add a request that the outbox has."""
        self._kept[request.request_id] = _Kept(stream, request.output_ids, request.num_prompt_reported)
        self._names.setdefault(stream.name, {})[request.request_id] = None

    def find(self, name: str, tenant: str) -> tuple[bytes, list[StreamPart]]:
        """Return the record and the requests of a tenant's stream."""
        parts, record = [], b""
        for request_id in self._names.get(name, ()):
            kept, log = self._kept[request_id], self._outbox.log(request_id)
            if log is not None and kept.stream.tenant == tenant:
                record = kept.stream.record
                parts.append(_part(request_id, kept, log))
        return record, parts

    def is_known(self, request_id: str) -> bool:
        """Return whether this is a resumable request that is kept."""
        return request_id in self._kept

    def detach(self, ingress_id: str, request_id: str, now: float) -> None:
        """Note that a request's reader has left. Its output goes to no ingress, so that none of the former
        ingress's late messages ends it.
        """
        if request_id in self._kept and self._outbox.owns(ingress_id, request_id):
            self._outbox.move(request_id, NO_INGRESS)
            self.leave(request_id, now)

    def take_over(self, ingress_id: str, request_id: str) -> str | None:
        """Send a request's output to this ingress from now on. Return the one that read it before, if another."""
        if request_id not in self._kept or self._outbox.owns(ingress_id, request_id):
            return None
        former = self._outbox.move(request_id, ingress_id)
        self.take(request_id)
        return former

    def leave(self, request_id: str, at: float) -> None:
        """Note that a request has no reader since `at`, or ended then. Streams that exceed the tenant's bounds now
        are aborted and forgotten.
        """
        kept, log = self._kept.get(request_id), self._outbox.log(request_id)
        if kept is None or log is None or (kept.left_at is not None and not log.has_ended):
            return
        kept.left_at = at
        kept.num_bytes = len(kept.stream.record) + len(kept.output_ids) + size_of(log.delta)
        own = self._left.setdefault(kept.stream.tenant, {})
        own.pop(request_id, None)
        own[request_id] = None
        excess = list(self._excess(own))
        for each in excess:
            log = self._outbox.log(each)
            if log is not None and not log.has_ended:
                self._abort(each)
        self.forget(excess)

    def take(self, request_id: str) -> None:
        """Note that a request has a reader again."""
        kept, log = self._kept.get(request_id), self._outbox.log(request_id)
        if kept is not None and log is not None and not log.has_ended:
            kept.left_at = None
            self._stop_counting(request_id, kept)

    def look_through(self, now: float, absent_since: Mapping[str, float]) -> None:
        """Abort the requests that have had no reader for too long, and forget those that ended long ago. Readers
        of these ingresses have left.
        """
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        for ingress_id, since in absent_since.items():
            for request_id in self._outbox.live_of(ingress_id):
                self.leave(request_id, since)
        for request_id, kept, log in list(self._without_reader()):
            since_s = now - (kept.left_at or now)
            asked_s = kept.stream.detached_s
            if log.has_ended:
                if since_s >= self._settings.keep_s:
                    self.forget([request_id])
            elif since_s >= (self._settings.detached_s if asked_s is None else asked_s) and not log.was_aborted:
                log.was_aborted = True
                self._abort(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests, here and in the outbox. They may be unknown."""
        for request_id in request_ids:
            self._outbox.forget([request_id])
            kept = self._kept.pop(request_id, None)
            if kept is not None:
                self._stop_counting(request_id, kept)
                ids = self._names[kept.stream.name]
                ids.pop(request_id, None)
                if not ids:
                    del self._names[kept.stream.name]

    @property
    def num_without_reader(self) -> int:
        """Number of requests without a reader, ended or not."""
        return sum(map(len, self._left.values()))

    @property
    def num_bytes(self) -> int:
        """Their size."""
        return sum(self._kept[request_id].num_bytes for own in self._left.values() for request_id in own)

    def _without_reader(self) -> Iterator[tuple[str, _Kept, StreamLog]]:
        for own in self._left.values():
            for request_id in own:
                log = self._outbox.log(request_id)
                if log is not None:
                    yield request_id, self._kept[request_id], log

    def _excess(self, own: dict[str, None]) -> Iterator[str]:
        num_kept, num_bytes = len(own), sum(self._kept[request_id].num_bytes for request_id in own)
        for request_id in own:
            if num_kept <= self._settings.max_kept and num_bytes <= self._settings.max_kept_bytes:
                return
            num_kept -= 1
            num_bytes -= self._kept[request_id].num_bytes
            yield request_id

    def _stop_counting(self, request_id: str, kept: _Kept) -> None:
        own = self._left.get(kept.stream.tenant, {})
        own.pop(request_id, None)
        if not own:
            self._left.pop(kept.stream.tenant, None)


def _part(request_id: str, kept: _Kept, log: StreamLog) -> StreamPart:
    return StreamPart(
        kept.stream.index,
        request_id,
        len(kept.output_ids) // 4 + log.delta.end,
        kept.output_ids,
        kept.num_prompt_reported,
        kept.stream.num_cached,
        log.delta.finish_reason,
    )
