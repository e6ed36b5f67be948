"""The stream that a request asks for: whether it can be continued, from where, and how long it may run unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from starlette.types import Scope

from deployments.api.base.errors import invalid, quoted
from deployments.api.http.body import JsonBody
from deployments.api.http.scopes import header, route_path
from deployments.api.output.response_encoder import AnswerName
from deployments.api.streams.position import StreamPosition, wrong_id
from deployments.api.streams.record import StreamRecord, kept_headers
from deployments.config.settings import StreamSettings
from deployments.wire.messages import ResumableStream
from engine.values.sampling_params import MAX_SEED

RESPONSES = "/v1/responses"
PREFIXES: Mapping[str, str] = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/messages": "msg_",
    RESPONSES: "resp_",
}
"""How the names of answers begin, by the path of their endpoint."""


@dataclass(slots=True)
class AskedStream:
    """The stream that a request asks for, if it asks for one."""

    name: AnswerName
    has_ids: bool
    """Whether its events have ids, because the client asked for them or all streams have them."""
    position: StreamPosition | None = None
    """The position at which to continue; None: from the first event."""
    detached_s: float | None = None
    """Seconds for which it may be generated without a reader; None: as the settings have it."""
    is_continued: bool = False
    """Whether it was begun by an earlier request."""
    in_background: bool = False
    """Whether it is that of a response in the background. It can be continued even if its events have no ids."""
    after: int = -1
    """For such a response, the number of the last event that the client has."""
    keep_s: float = 0.0
    """Seconds for which replicas keep it without a reader."""
    is_wanted: bool = True
    """Whether it may be generated without a reader."""
    record: bytes = b""
    """The request, to be run again where the stream is continued; empty where it is too large."""

    @property
    def is_asked(self) -> bool:
        """Whether any ingress shall be able to continue it."""
        return self.has_ids or self.in_background

    @property
    def seed(self) -> int:
        """The seed of a request without one, which makes the same tokens again wherever it runs."""
        return int.from_bytes(blake2b(self.name.id.encode(), digest_size=8).digest(), "little") % MAX_SEED

    def note(self, scope: Scope, body: JsonBody, settings: StreamSettings) -> None:
        """Note whether a request asks for a stream in the background, and keep it, unless it is too large."""
        if body.fields.get("stream") is not True:
            return
        path = route_path(scope)
        if path == RESPONSES and body.fields.get("background") is True:
            self.in_background, self.detached_s = True, settings.max_detached_s
        if self.is_asked and body.text:
            created, kept, text = self.name.created, kept_headers(scope), bytes(body.text)
            packed = StreamRecord(path, created, text, kept, self.has_ids, self.in_background).packed()
            self.record = packed if len(packed) <= settings.max_record_bytes else b""

    def part(self, index: int, tenant: str) -> ResumableStream:
        """Return what an engine is told with a request."""
        return ResumableStream(self.name.id, index, tenant, self.record, self.detached_s)


_STREAM = "raydix.stream"
_NO_STREAM = AskedStream(AnswerName("", 0), has_ids=False)


def asked_stream(scope: Scope, settings: StreamSettings) -> AskedStream:
    """Read the headers of a request. Raises `ApiError` 400."""
    path = route_path(scope)
    if (given := scope.get(_STREAM)) is not None:
        given.detached_s, given.keep_s = _detached_s(scope, settings), settings.keep_s
        return given  # type: ignore[no-any-return]
    if (prefix := PREFIXES.get(path)) is None:
        return _NO_STREAM
    detached_s, last = _detached_s(scope, settings), header(scope, b"last-event-id")
    if not last:  # Browsers send an empty one after events without an id.
        has_ids = settings.ids == "always" or _takes_events(scope)
        return AskedStream(AnswerName.new(prefix), has_ids, detached_s=detached_s)
    position = StreamPosition.parse(last)
    if not position.name.id.startswith(prefix):
        raise wrong_id(
            f"Last-Event-ID belongs to another endpoint's stream: an id of {path} begins with {prefix}."
        )
    return AskedStream(position.name, True, position, detached_s, is_continued=True, keep_s=settings.keep_s)


def with_stream(scope: Scope, stream: AskedStream) -> Scope:
    """Return the scope of a request that continues a stream."""
    return {**scope, _STREAM: stream}


def _takes_events(scope: Scope) -> bool:
    """Whether the client names the type of event streams, as those do that send Last-Event-ID."""
    accepted = (header(scope, b"accept") or "").split(",")
    return any(media.partition(";")[0].strip().lower() == "text/event-stream" for media in accepted)


def _detached_s(scope: Scope, settings: StreamSettings) -> float | None:
    given = header(scope, b"x-raydix-detached-s")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= settings.max_detached_s:
        most = f"{settings.max_detached_s:g} (streams.max_detached_s)"
        raise invalid(
            f"x-raydix-detached-s must be a number of seconds from 0 to {most}, got {quoted(given)}.",
            "x-raydix-detached-s",
        )
    return seconds
