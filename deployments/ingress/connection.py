"""One client's connection to an ingress: its bounds, its end, and what it says that is not HTTP/1.1."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.api.errors import ApiError, quoted
from deployments.api.http.error_response import error_body
from deployments.api.http.transport import ON_DISCONNECT, logger
from deployments.ingress.gathered_writes import GatheredWrites
from deployments.ingress.reader_watch import ReaderWatch

LAST_CALL_S = 1
"""Seconds for which a server that drains keeps a connection for one more request, which may be on its way."""
LINGER_S = 2.0
"""Seconds that a client has to read an answer that came before its request's body was read; then the end."""


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """How long a client may take, and how much it may send, before its connection is ended."""

    header_timeout_s: float
    max_header_bytes: int
    unread_s: float
    """Time in which a client must read something of what was written to it."""
    header_timeout_setting: str | None = None
    max_header_bytes_setting: str | None = None
    """The settings of these bounds, for errors; None where they are constants."""

    def too_large(self) -> ApiError:
        """Create the error of headers that are larger."""
        size = f"{self.max_header_bytes} bytes{_by(self.max_header_bytes_setting)}"
        return ApiError(431, f"The headers are larger than {size}.")

    def too_late(self) -> ApiError:
        """Create the error of headers that come later."""
        seconds = f"{self.header_timeout_s:g} seconds{_by(self.header_timeout_setting)}"
        return ApiError(408, f"The headers did not arrive within {seconds}.")


def _by(setting: str | None) -> str:
    return f" ({setting})" if setting else ""


class Connection(HttpToolsProtocol):
    """One connection, with what uvicorn leaves out.

    It is closed when a request's headers are too large, too late or not HTTP/1.1, and when its client reads
    nothing for long. When the server drains, a request that its client sends before it has noticed is answered, as
    its last. A request to go on in another protocol is answered in this one.
    """

    url = b""
    """As much as arrived of the request's path and query; what it inherits sets it with the first byte."""

    def __init__(self, *args: Any, bounds: ConnectionBounds, **options: Any) -> None:
        """The time begins with the connection, or with the first byte of a later request."""
        super().__init__(*args, **options)
        self._bounds = bounds
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_in_headers = False
        self._num_header_bytes = 0
        self._linger_timer: asyncio.TimerHandle | None = None
        self._is_last_call = self._is_over = False
        self._on_disconnect: dict[object, Callable[[], None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request."""
        writes = GatheredWrites(cast(asyncio.Transport, transport), self.loop, lambda: self._reader.begin())
        self._reader = ReaderWatch(writes, self.loop, self._bounds.unread_s)
        super().connection_made(cast(asyncio.Transport, writes))
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection, and what is done for its requests."""
        self._stop_timer()
        self._reader.stop()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)
        for watch in list(self._on_disconnect):
            self._tell(watch)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, unless nothing is expected or it makes the headers too large."""
        if self._is_over:
            return
        if self._header_timer is not None:
            self._num_header_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._is_in_headers and self._header_timer is None:
            self._await_headers()
        # A body that came with the headers was counted, but then they are complete.
        if self._header_timer is not None and self._num_header_bytes > self._bounds.max_header_bytes:
            self._refuse(self._bounds.too_large())

    def _parse(self, data: bytes) -> None:
        """Parse what arrived.

        Of a request that asks for another protocol (RFC 9110, 7.8), the parser takes the headers for all of it, as
        if what follows, its body, were the other protocol's. So its headers are parsed again, without that.
        """
        rest = memoryview(data)
        try:
            while (size := self._feed(rest)) is not None:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(ApiError(405, "The method CONNECT is not allowed: this server is no proxy."))
                    return
                head, rest = self._without_upgrade(), rest[size:]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)
        except httptools.HttpParserError as error:
            self._refuse(_unreadable(self.url, error))

    def _feed(self, data: memoryview) -> int | None:
        """Have data parsed. Return where headers end that ask for another protocol, None if there are none."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            size: int = upgrade.args[0]
            return size
        return None

    def _without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        """Begin to read headers; if they do not come at once, the rest of them is waited for."""
        super().on_message_begin()
        self._is_in_headers = True

    def on_headers_complete(self) -> None:
        """Begin to answer, unless the request is parsed again (`_stay`)."""
        if self.parser.should_upgrade():
            return
        self._stop_timer()
        super().on_headers_complete()
        cast(dict[str, Any], self.scope)[ON_DISCONNECT] = self._watch
        if self._is_last_call and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """Tell the endpoint that it has all of the body, unless the request is parsed again."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def pause_writing(self) -> None:
        """Write no more for now, as the client does not read."""
        super().pause_writing()
        self._reader.begin()

    def _watch(self, leave: Callable[[], None]) -> Callable[[], None]:
        """Have `leave` called when the client has disconnected; return a function that takes it back."""
        watch = object()
        self._on_disconnect[watch] = leave
        if self.transport.is_closing():  # it left before it was watched
            self.loop.call_soon(self._tell, watch)

        def unwatch() -> None:
            self._on_disconnect.pop(watch, None)

        return unwatch

    def _tell(self, watch: object) -> None:
        leave = self._on_disconnect.pop(watch, None)
        if leave is not None:
            leave()

    def on_response_complete(self) -> None:
        """Go on with the next request; after one that was answered before its body had come, there is none."""
        has_more = self.cycle is not None and self.cycle.more_body and not self.pipeline
        if not has_more or self.transport.is_closing():
            super().on_response_complete()
            return
        self._is_over = True
        self.transport.write_eof()
        # A connection that is closed while its client sends is reset, and the answer may be lost.
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def shutdown(self) -> None:
        """Close the connection after its last request; uvicorn calls this when the server drains."""
        self._is_last_call, self.timeout_keep_alive = True, LAST_CALL_S
        if self.cycle is None or self.cycle.response_complete:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(LAST_CALL_S, self.timeout_keep_alive_handler)

    def _await_headers(self) -> None:
        self._num_header_bytes = 0
        bounds = self._bounds
        self._header_timer = self.loop.call_later(bounds.header_timeout_s, self._refuse, bounds.too_late())

    def _stop_timer(self) -> None:
        self._is_in_headers = False
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, error: ApiError) -> None:
        self._stop_timer()
        if self.transport.is_closing():
            return
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not is_answering:
            body = error_body(error, self.url.partition(b"?")[0].decode("latin-1"))
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            head += f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


def _unreadable(url: bytes, error: httptools.HttpParserError) -> ApiError:
    """Create the error of what cannot be parsed as HTTP/1.1. `url` is what was parsed before."""
    if url == b"*" and "PRI" in str(error):
        return ApiError(400, "This server speaks HTTP/1.1, and the connection began with HTTP/2: use HTTP/1.1.")
    if isinstance(error.__context__, httptools.HttpParserInvalidURLError):
        return ApiError(400, f"The request's URL, {quoted(url.decode('latin-1'))}, cannot be parsed.")
    if isinstance(error, httptools.HttpParserCallbackError):
        logger.error("a request failed while it was parsed", exc_info=error)
        return ApiError(500, "The server failed on this request.")
    return ApiError(400, f"The request is not HTTP/1.1 as this server can read it: {error}.")
