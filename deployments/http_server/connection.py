"""One client's connection to an ingress: its bounds, its end, and its errors in HTTP/1.1.

bytes ──▶ `Unparsed` ──a piece──▶ httptools ──▶ head ─▶ checked ─▶ the endpoint's task begins
                                            └─▶ body ─▶ the task
                                            └─▶ trailers are dropped
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Literal, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.api.base.errors import ApiError, quoted
from deployments.api.http.error_response import error_body
from deployments.api.http.transport import ON_DISCONNECT, logger
from deployments.http_server.gathered_writes import GatheredWrites
from deployments.http_server.reader_watch import ReaderWatch
from deployments.http_server.request_head import check_framing, origin_form
from deployments.http_server.small_reads import READ_BYTES, SmallReads
from deployments.http_server.unparsed import PIECE_BYTES, PIECE_COST, ParseTurns, Unparsed
from deployments.wire.deadlines.deadline import Deadline

LAST_CALL_S = 1
"""Seconds for which a server that drains keeps a connection for one more request, which may be on its way."""
LINGER_S = 2.0
"""Seconds that a client has to read the last answer of its connection while it may still send; then the end."""
MAX_UNPARSED_BYTES = READ_BYTES
"""Bytes waiting to be parsed at which reading pauses."""
TURN_S = 0.1
"""Seconds until the next look at a connection whose time is over but that waits for its turn to parse."""
SMALL_BYTES = 1024
"""This much is parsed immediately although others wait for their turn."""
CHUNK_FRAME_BYTES = 20
"""Bytes around each chunk that are not counted: its size and two line ends."""


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """How long a client may take, and how much it may send, before its connection is ended."""

    header_timeout_s: float
    max_header_bytes: int
    """Bytes of a request outside its body: its head, chunk extensions and trailers."""
    max_headers: int
    unread_s: float
    """Time in which a client must read enough of what waits for it."""
    min_read_bytes_per_s: float
    """How much that is, in bytes per second; at least one byte."""
    header_timeout_setting: str | None = None
    max_header_bytes_setting: str | None = None
    max_headers_setting: str | None = None
    """The settings of these bounds, for errors; None where they are constants."""

    def too_many(self) -> ApiError:
        """Create the error of more headers."""
        return ApiError(431, f"There are more than {self.max_headers} headers{_by(self.max_headers_setting)}.")

    def too_large(self) -> ApiError:
        """Create the error of headers that are larger."""
        size = f"{self.max_header_bytes} bytes{_by(self.max_header_bytes_setting)}"
        return ApiError(431, f"The headers, with chunk extensions and trailers, are larger than {size}.")

    def too_late(self) -> ApiError:
        """Create the error of headers that come later."""
        seconds = f"{self.header_timeout_s:g} seconds{_by(self.header_timeout_setting)}"
        return ApiError(408, f"The headers did not arrive within {seconds}.")


def protocols(bounds: Callable[[], ConnectionBounds]) -> Callable[..., asyncio.BaseProtocol]:
    """Return a factory for the protocol of each connection of one server, from uvicorn's options. `bounds` are
    read at each connection's beginning.
    """
    turns, buffer = ParseTurns(), memoryview(bytearray(READ_BYTES))
    return lambda **options: SmallReads(Connection(bounds=bounds(), turns=turns, **options), buffer)


def _by(setting: str | None) -> str:
    return f" ({setting})" if setting else ""


class _Flow(FlowControl):
    """Stops reading from a client while enough bytes wait for the parser."""

    is_full = False

    def resume_reading(self) -> None:
        """Resume reading, unless enough bytes wait."""
        if not self.is_full:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """One connection, with checks and limits that uvicorn lacks.

    A request is parsed when the one before it is answered, and little is held until then. A request that is too
    large, too late or not HTTP/1.1 is refused, and the connection of a client that stops reading is ended. When
    the server drains, a request that its client sends before it has noticed is answered, as its last. A request to
    switch to another protocol is answered in this one.
    """

    url = b""
    """The received part of the request's path and query; the base class sets it with the first byte."""

    def __init__(self, *args: Any, bounds: ConnectionBounds, turns: ParseTurns, **options: Any) -> None:
        """The time begins with the connection, or with the first byte of a later request."""
        super().__init__(*args, **options)
        self._bounds, self._turns = bounds, turns
        self._unparsed, self._has_to_wait = Unparsed(), False
        self._deadline = Deadline(self.loop)
        self._awaits: Literal["head", "request", None] = None
        """Purpose of the deadline: the rest of a head, or the first byte of another request."""
        self._is_in_head = False
        self._num_outside = 0  # bytes of the request outside its body: its head, the sizes of chunks, trailers
        self._body_left = 0  # bytes of a body of known length
        self._fault: ApiError | None = None
        self._is_last_call = self._is_over = False
        self._is_kept = False  # kept for another request, once the present one's body has arrived
        self._on_disconnect: dict[object, Callable[[], None]] = {}

    # --- the connection ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request."""
        self._writes = GatheredWrites(cast(asyncio.Transport, transport), self.loop, self._is_to_close)
        bounds = self._bounds
        self._reader = ReaderWatch(self._writes, self.loop, bounds.unread_s, bounds.min_read_bytes_per_s)
        self._writes.set_write_buffer_limits(high=0)  # It then holds one message, and reports when that was read.
        super().connection_made(cast(asyncio.Transport, self._writes))
        self.flow = self._flow = _Flow(self.transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection, and the work for its requests."""
        self._is_over = True
        self._deadline.cancel()
        self._reader.stop()
        super().connection_lost(exc)
        for watch in list(self._on_disconnect):
            self._tell(watch)
        # The old request still refers to its connection. Without a reference back there is no cycle to collect.
        self.cycle = self.scope = self.headers = None  # type: ignore[assignment]
        self._writes.forget()

    def pause_writing(self) -> None:
        """Pause writing, because the client does not read."""
        super().pause_writing()
        self._reader.begin()

    def resume_writing(self) -> None:
        """Resume writing: the client has read everything, or the kernel has taken it."""
        super().resume_writing()
        self._reader.stop()

    def shutdown(self) -> None:
        """Close the connection after its last request; uvicorn calls this when the server drains."""
        self._is_last_call = True
        if self._is_idle and not self._is_over:
            self._await_request()

    @property
    def _is_idle(self) -> bool:
        """Whether the head of a request is expected next."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        if self._awaits != "head":
            self._awaits = "head"
            self._set_deadline(self._bounds.header_timeout_s, partial(self._refuse, self._bounds.too_late()))

    def _await_request(self) -> None:
        self._awaits = "request"
        seconds = LAST_CALL_S if self._is_last_call else self.timeout_keep_alive
        self._set_deadline(seconds, self.transport.close)

    def _set_deadline(self, seconds: float, end: Callable[[], None]) -> None:
        """Call `end` in so many seconds. Bytes that have arrived by then are parsed before."""
        self._deadline.set(seconds, lambda: self._set_deadline(TURN_S, end) if self._has_to_wait else end())

    # --- parsing -------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes, unless other work has to come first."""
        if self._is_over:
            return
        self._unparsed.add(data)
        if not self._has_to_wait:
            if self._turns.is_busy and len(data) > SMALL_BYTES and self._may_parse:
                self._wait_for_turn()
            else:
                self._parse()
        self._bound_reading()

    @property
    def _may_parse(self) -> bool:
        return bool(self._unparsed) and not self._is_over and (self._is_idle or self.cycle.more_body)

    def _parse(self) -> None:
        """Parse as much as one turn allows."""
        left = PIECE_BYTES
        while left > 0 and self._may_parse:
            piece = self._unparsed.cut(self._body_left)
            if not self._body_left:
                left -= max(len(piece), PIECE_COST)
            self._parse_piece(piece)
        if self._may_parse:
            self._wait_for_turn()
        elif self._is_idle and not self._is_over:
            self._await_head()

    def _wait_for_turn(self) -> None:
        if not self._has_to_wait:
            self._has_to_wait = True
            self._turns.wait(self._parse_more)

    def _parse_more(self) -> None:
        self._has_to_wait = False
        if not self._is_over:
            self._parse()
            self._bound_reading()

    def _bound_reading(self) -> None:
        """Stop reading while enough bytes wait."""
        if self._is_over:
            return
        self._flow.is_full = len(self._unparsed) >= MAX_UNPARSED_BYTES
        if self._flow.is_full:
            self.flow.pause_reading()
        elif self._is_idle or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def _parse_piece(self, piece: bytes) -> None:
        self._num_outside += len(piece)
        try:
            self._feed(piece)
        except httptools.HttpParserError as error:
            self._fault = self._fault or _unreadable(self.url, error)
        if self._num_outside > self._bounds.max_header_bytes:
            self._fault = self._fault or self._bounds.too_large()
        if self._fault is not None:
            self._refuse(self._fault)

    def _feed(self, piece: bytes) -> None:
        """Have a piece parsed.

        If a request asks for another protocol (RFC 9110, 7.8), the parser ends it after the headers, and treats
        its body as bytes of the other protocol. So its headers are parsed again, without that request.
        """
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            if self.parser.get_method() == b"CONNECT":
                self._fault = ApiError(405, "The method CONNECT is not allowed: this server is no proxy.")
                return
            head = self._without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(head)

    def _without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # --- calls of the parser ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin to read a head."""
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers are dropped, because they come after the headers were checked (RFC 9110,
        6.5.1)."""
        if not self._is_in_head:
            return
        if len(self.headers) < self._bounds.max_headers:
            super().on_header(name, value)
        else:
            self._fault = self._bounds.too_many()

    def on_headers_complete(self) -> None:
        """Begin to answer, unless the request is parsed again (`_feed`), or is refused."""
        if self.parser.should_upgrade():
            return
        self._is_in_head = False
        try:
            self.url = self._checked_url()
        except ApiError as error:
            self._fault = self._fault or error
        if self._fault is not None:
            return
        self._body_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self._deadline.cancel()
        self._awaits = None
        super().on_headers_complete()
        cast(dict[str, Any], self.scope)[ON_DISCONNECT] = self._watch
        self._is_kept = self.cycle.keep_alive and not self._is_last_call
        self.cycle.keep_alive = False  # Only an answer to a complete body keeps the connection.

    def _checked_url(self) -> bytes:
        version = self.parser.get_http_version()
        check_framing(version, self.headers)
        return origin_form(version, self.url, self.headers)

    def on_chunk_header(self) -> None:
        """Allow the bytes around each chunk of a body."""
        self._num_outside = max(0, self._num_outside - CHUNK_FRAME_BYTES)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._num_outside = max(0, self._num_outside - len(body))
        if self._body_left:
            self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Tell the endpoint that it has all of the body, unless there is none yet."""
        if self._fault is None and not self.parser.should_upgrade():
            self._num_outside = 0
            super().on_message_complete()
            if not self.cycle.response_started:
                self.cycle.keep_alive = self._is_kept

    # --- disconnects -----------------------------------------------------------------------------------------

    def _watch(self, leave: Callable[[], None]) -> Callable[[], None]:
        """Call `leave` when the client disconnects; return a function that cancels this."""
        watch = object()
        self._on_disconnect[watch] = leave
        if self.transport.is_closing():  # The client left before the watch began.
            self.loop.call_soon(self._tell, watch)

        def unwatch() -> None:
            self._on_disconnect.pop(watch, None)

        return unwatch

    def _tell(self, watch: object) -> None:
        leave = self._on_disconnect.pop(watch, None)
        if leave is not None:
            leave()

    # --- the end of a request --------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Continue with the next request."""
        self.server_state.total_requests += 1
        if self._is_over or self.transport.is_closing():
            return
        if self._unparsed:
            self._wait_for_turn()
        else:
            self.flow.resume_reading()
            self._await_request()

    def _is_to_close(self) -> bool:
        """Return whether the connection may be closed now; linger first if the client still sends a body that is
        not read."""
        if not self._is_over and self.cycle is not None and self.cycle.response_complete and self.cycle.more_body:
            self._linger()
            return False
        self._reader.begin()
        return True

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun, and end the connection."""
        self._is_over = True
        self._deadline.cancel()
        if self.transport.is_closing():
            return
        if not self._is_idle:
            if self.cycle.response_started:
                self.transport.close()
                return
            # Its endpoint waits for the rest of the body, and learns that none will arrive.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = error_body(error, self.url.partition(b"?")[0].decode("latin-1"))
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        head += f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._linger()

    def _linger(self) -> None:
        """End the connection after its last answer.

        A connection that is closed while its client sends is reset, and the answer may be lost.
        """
        self._is_over, self._flow.is_full = True, False
        self._unparsed.clear()
        self.parser = self.scope = self.headers = None  # type: ignore[assignment]
        if self.cycle is not None:
            self.cycle.body.clear()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._deadline.set(LINGER_S, self.transport.close)


def _unreadable(url: bytes, error: httptools.HttpParserError) -> ApiError:
    """Create the error of bytes that cannot be parsed as HTTP/1.1. `url` was parsed before them."""
    if url == b"*" and "PRI" in str(error):
        return ApiError(400, "This server speaks HTTP/1.1, and the connection began with HTTP/2: use HTTP/1.1.")
    if isinstance(error.__context__, httptools.HttpParserInvalidURLError):
        return ApiError(400, f"The request's URL, {quoted(url.decode('latin-1'))}, cannot be parsed.")
    if isinstance(error, httptools.HttpParserCallbackError):
        logger.error("a request failed while it was parsed", exc_info=error)
        return ApiError(500, "The server failed on this request.")
    return ApiError(400, f"The request is not HTTP/1.1 as this server can read it: {error}.")
