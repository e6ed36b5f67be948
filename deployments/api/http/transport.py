"""Between ASGI and the endpoints: disconnects cancel work, streams send bytes, responses have a request id."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import chain
from secrets import token_hex
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.base.errors import ApiError, invalid, log_failure, unexpected
from deployments.api.http.body import ClientGone
from deployments.api.http.body_memory import BodyRoom
from deployments.api.http.error_response import error_response
from deployments.api.http.parts import parts_of
from deployments.api.http.scopes import REQUEST_ID, send_for_bodies
from deployments.api.http.unread import SMALL_BYTES, unread_room
from deployments.config.limits import Limits
from deployments.wire.deadlines.time_limit import TimeLimit

logger = logging.getLogger(__name__)
T = TypeVar("T")
_HEADERS = "raydix.answer_headers"
_MAX_REQUEST_ID_CHARS = 128


def name_ignored(scope: Scope, fields: Sequence[str]) -> None:
    """Have the response name fields of the request that were ignored; they must fit into a header."""
    _add_header(scope, b"x-raydix-ignored-fields", ", ".join(fields))


def name_version(scope: Scope, version: str | None) -> None:
    """Have the response name the version of the model that answers, if the model has versions."""
    if version is not None:
        _add_header(scope, b"x-raydix-version", version)


def _add_header(scope: Scope, name: bytes, value: str) -> None:
    scope.setdefault(_HEADERS, {})[name] = value.encode("ascii")


ON_DISCONNECT = "raydix.on_disconnect"
"""Where a server that can do so leaves a function in the scope: it takes a callback, calls it when the client has
disconnected, and returns a function that takes it back. It saves the task that waits for ASGI's own message. Such
a server also ends the connections of clients that do not read."""


async def until_disconnect(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return `work`'s result. Cancels it and raises `ClientGone` when the client disconnects first.

    The request's body must have been read, because `receive` then returns nothing but the disconnect.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancelling, has_left = task.cancelling(), False

    def leave() -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    unwatch = scope[ON_DISCONNECT](leave) if ON_DISCONNECT in scope else _watch(receive, leave)
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and task.cancelling() == num_cancelling + 1:
            raise ClientGone from None
        raise
    finally:
        unwatch()
        if has_left:
            task.uncancel()


def _watch(receive: Receive, leave: Callable[[], None]) -> Callable[[], None]:
    """Call `leave` when ASGI's message says that the client has left; return a function that stops the waiting."""

    def on_end(watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled():
            watcher.exception()  # A server that cannot report that the client left has lost it, too.
            leave()

    def unwatch() -> None:
        watcher.remove_done_callback(on_end)
        watcher.cancel()

    watcher = asyncio.create_task(_disconnect(receive))
    watcher.add_done_callback(on_end)
    return unwatch


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_JSON = "application/json"
_OF_STREAMS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
"""Headers of event streams, which no proxy may buffer."""


class EventStream(Response):
    """Sends server-sent events until the client disconnects or stops reading. Always calls `close` at the end.

    Closing the chunks' generator would not suffice: a generator that never started runs no `finally`.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        slow_reader_timeout_s: float,
        headers: dict[str, str],
        num_kept: int = 0,
    ) -> None:
        """`num_kept` bytes are kept for the chunks until the end, besides the one that is sent."""
        # Skip Response.__init__, which derives headers from a complete body.
        self.status_code, self.background = 200, None
        own = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self.raw_headers = [*_OF_STREAMS, *own]
        self._chunks = chunks
        self._close = close
        self._num_kept, self._slow_reader_timeout_s = num_kept, slow_reader_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all chunks, or an error when there is no room for the kept bytes."""
        self._limit = TimeLimit(math.inf if ON_DISCONNECT in scope else self._slow_reader_timeout_s)
        try:
            # Servers report a disconnect to a sender as OSError.
            with contextlib.suppress(ClientGone, OSError), unread_room(scope) as room:
                try:
                    room.take(self._num_kept)
                except ApiError as error:
                    await error_response(error, scope)(scope, receive, send)
                    return
                sending = self._send_all(send, send_for_bodies(scope, send), room)
                await until_disconnect(scope, receive, sending)
        finally:
            self._limit.close()
            await self._close()

    async def _send_all(self, send_head: Send, send: Send, room: BodyRoom) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send_head(start)
        async for chunk in self._chunks:
            try:
                if len(chunk) <= SMALL_BYTES:
                    with self._limit:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                else:
                    await self._send_large(chunk, send, room)
            except (TimeoutError, ApiError):  # the client does not read, so no error can be sent
                raise ClientGone from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_large(self, chunk: bytes, send: Send, room: BodyRoom) -> None:
        """Send a chunk if there is room for it, otherwise the stream's error chunks.

        Raises `ApiError` when there are none, or they are large too.
        """
        num_taken = len(chunk)
        try:
            room.take(num_taken)
        except ApiError as error:
            chunk, num_taken = await self._chunks.athrow(error), 0
            if len(chunk) > SMALL_BYTES:
                raise
        for part in parts_of([chunk]):
            with self._limit:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # other streams continue
        with self._limit:
            # An empty message waits until the server took the last part.
            await send({"type": "http.response.body", "body": b"", "more_body": True})
        room.give_back(num_taken)


class _Whole(Response):
    """Sends a body in parts, until the client disconnects, while there is room for all of it."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        status: int,
        headers: Mapping[str, str] | None,
        media_type: str | None,
        num_kept: int,
    ) -> None:
        super().__init__(None, status, headers, media_type)
        size = sum(map(len, pieces))
        self.headers["content-length"] = str(size)
        self._pieces, self._num_bytes = pieces, size + num_kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all parts, or an error when there is no room."""
        with unread_room(scope) as room:
            try:
                room.take(self._num_bytes)
            except ApiError as error:
                self._pieces = ()  # Free the parts before the error is sent.
                await error_response(error, scope)(scope, receive, send)
                return
            with contextlib.suppress(ClientGone, OSError):  # servers report a disconnect to a sender as OSError
                await until_disconnect(scope, receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in parts_of(self._pieces):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # other streams continue
        # The end waits until the server took the last part.
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def whole(
    pieces: Sequence[bytes],
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    media_type: str | None = None,
    num_kept: int = 0,
) -> Response:
    """Create a response with a body in pieces. A large body is sent in parts, as it is read; `num_kept` further
    bytes are kept with it.
    """
    if sum(map(len, pieces)) > SMALL_BYTES:
        return _Whole(pieces, status, headers, media_type, num_kept)
    return Response(b"".join(pieces), status, headers, media_type)


def json_in_pieces(
    pieces: Sequence[bytes], headers: Mapping[str, str] | None = None, num_kept: int = 0
) -> Response:
    """Create a response whose body is JSON in these pieces (`whole`)."""
    return whole(pieces, 200, headers, _JSON, num_kept)


def json_response(content: object, status: int = 200) -> Response:
    """Create a response with `content` as JSON."""
    return whole([msgspec.json.encode(content)], status, media_type=_JSON)


class Envelope:
    """Middleware that bounds the headers, gives the request an id, and answers after unexpected exceptions."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        *,
        names_answers: bool = True,
        on_named: Callable[[str], None] = lambda name: None,
    ) -> None:
        """With `names_answers`, every response has x-request-id; without, the server around the API adds it.

        `on_named` is called with each request's id, in the request's context.
        """
        self._app, self._on_named = app, on_named
        self._limits = limits
        self._names_answers = names_answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with an id in its scope and in the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for header, value in scope["headers"] if header == b"x-request-id"]
        is_fit = len(set(given)) == 1 and _is_fit(given[0])
        name = scope[REQUEST_ID] = given[0].decode("ascii") if is_fit else f"req-{token_hex(16)}"
        self._on_named(name)
        has_started = False

        async def named_send(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                if _HEADERS in scope:
                    message["headers"] = [*message.get("headers", ()), *scope[_HEADERS].items()]
            if message["type"] == "http.response.start" and self._names_answers:
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        try:
            error = self._check_size(scope) or (_unfit_id() if given and not is_fit else None)
            if error is None:
                await self._app(scope, receive, named_send)
            else:
                await error_response(error, scope)(scope, receive, named_send)
        except ClientGone:
            return
        except Exception as error:
            log_failure(error, f"request {name}")
            if not has_started:
                await error_response(unexpected(error, name), scope)(scope, receive, named_send)

    def _check_size(self, scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        size = sum(map(len, chain.from_iterable(headers)))
        if len(headers) > self._limits.max_headers or size > self._limits.max_header_bytes:
            limits = self._limits
            most = f"{limits.max_headers} headers (limits.max_headers)"
            most += f" with {limits.max_header_bytes} bytes in all (limits.max_header_bytes)"
            return ApiError(431, f"The headers are too many or too large; at most {most} are allowed.")
        return None


def _is_fit(given: bytes) -> bool:
    """Return whether a client's id may go into logs, headers and traces unchanged."""
    return 0 < len(given) <= _MAX_REQUEST_ID_CHARS and all(33 <= byte <= 126 for byte in given)


def _unfit_id() -> ApiError:
    what = f"1 to {_MAX_REQUEST_ID_CHARS} visible ASCII characters without spaces"

    return invalid(f"x-request-id must be {what}, once; leave it out to get a generated id.", "x-request-id")
