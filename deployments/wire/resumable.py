"""The resumable streams of a replica: how to find them, and how long they are kept without a reader.

    read ── Detach, or its ingress is absent ──▶ detached ── `detached_s` ──▶ aborted
      ▲                                             │                           │
      └────────────────── TakeOver ─────────────────┴───────────────────────────┘
    ended ── `keep_s` after its end, or after its reader left ──▶ forgotten

Their tokens are in the outbox. A tenant's streams without a reader are bounded in number and bytes: the one whose
reader left first is forgotten first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deployments.config.settings import StreamSettings
from deployments.wire.messages import Generate, ResumableStream, StreamPart
from deployments.wire.outbox import Outbox, StreamLog, size_of


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

    def __init__(self, outbox: Outbox, settings: StreamSettings) -> None:
        self._outbox, self._settings = outbox, settings
        self._kept: dict[str, _Kept] = {}
        self._names: dict[str, dict[str, None]] = {}  # stream -> its requests
        self._left: dict[str, dict[str, None]] = {}  # tenant -> its requests without a reader, in order of leaving

    def open(self, request: Generate, stream: ResumableStream) -> None:
        """Add a request that the outbox has."""
        self._kept[request.request_id] = _Kept(stream, request.output_ids, request.num_prompt_reported)
        self._names.setdefault(stream.name, {})[request.request_id] = None

    def find(self, name: str) -> tuple[ResumableStream | None, list[StreamPart]]:
        """Return the fields and the requests of a stream."""
        parts, stream = [], None
        for request_id in self._names.get(name, ()):
            log = self._outbox.log(request_id)
            if log is not None:
                stream = self._kept[request_id].stream
                parts.append(_part(request_id, self._kept[request_id], log))
        return stream, parts

    def is_known(self, request_id: str) -> bool:
        """Return whether this is a resumable request that is kept."""
        return request_id in self._kept

    def leave(self, request_id: str, at: float) -> list[str]:
        """Note that a request has no reader since `at`, or ended then. Return the requests that the tenant's
        bounds exclude now: those that run have to be aborted, and all to be forgotten.
        """
        kept, log = self._kept.get(request_id), self._outbox.log(request_id)
        if kept is None or log is None or (kept.left_at is not None and not log.has_ended):
            return []
        tenant = kept.stream.tenant
        kept.left_at = at
        kept.num_bytes = len(kept.stream.record) + len(kept.output_ids) + size_of(log.delta)
        own = self._left.setdefault(tenant, {})
        own.pop(request_id, None)
        own[request_id] = None
        return list(self._excess(own))

    def take(self, request_id: str) -> None:
        """Note that a request has a reader again."""
        kept, log = self._kept.get(request_id), self._outbox.log(request_id)
        if kept is not None and log is not None and not log.has_ended:
            kept.left_at = None
            self._stop_counting(request_id, kept)

    def forget(self, request_id: str) -> None:
        """Drop a request. It may be unknown."""
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return
        self._stop_counting(request_id, kept)
        ids = self._names[kept.stream.name]
        ids.pop(request_id, None)
        if not ids:
            del self._names[kept.stream.name]

    def abandoned(self, now: float) -> list[str]:
        """Return the requests that run and have had no reader for too long, each once."""
        found = []
        for request_id, kept, log in self._without_reader():
            longest = self._settings.detached_s if kept.stream.detached_s is None else kept.stream.detached_s
            if not (log.has_ended or log.was_aborted) and now - (kept.left_at or now) >= longest:
                log.was_aborted = True
                found.append(request_id)
        return found

    def expired(self, now: float) -> list[str]:
        """Return the ended requests that need not be kept any longer."""
        keep_s = self._settings.keep_s
        return [
            request_id
            for request_id, kept, log in self._without_reader()
            if log.has_ended and now - (kept.left_at or now) >= keep_s
        ]

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
