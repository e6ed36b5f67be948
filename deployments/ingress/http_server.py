"""The HTTP server inside an ingress: clients connect to it directly, and no proxy is between.

    client ──▶ a port that all ingresses of a machine share (SO_REUSEPORT) ──▶ uvicorn in one of them ──▶ the API

The kernel gives each new connection to one of the ingresses that listen. An ingress that is stopped says so at
/ready, closes its listener after `shutdown_delay_s`, and ends when its streams have.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.api.errors import ApiError
from deployments.api.http.error_response import error_body
from deployments.api.http.transport import ON_DISCONNECT
from deployments.config.limits import Limits
from deployments.config.settings import IngressSettings
from deployments.ingress.gathered_writes import GatheredWrites
from deployments.ingress.reader_watch import ReaderWatch

BACKLOG = 2048
"""Connections that the kernel holds until they are accepted."""
LAST_CALL_S = 1
"""Seconds for which a server that drains keeps a connection for one more request, which may be on its way."""


LINGER_S = 2.0
"""Seconds that a client has to read an answer that came before its request's body was read; then the end."""


class HttpPortError(RuntimeError):
    """The ingress cannot listen on its port; the message names the port, the setting, and what to do."""


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket whose port other ingresses of this machine may share. Raises HttpPortError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
        raise HttpPortError(
            f"an ingress cannot listen on {host}:{port} ({reason}): set ingresses.port to a port that no other "
            "program uses, and ingresses.host to an address of the ingress's node"
        ) from None
    return listener


def check_proxy(port: int, proxy_port: int | None) -> None:
    """Raise HttpPortError if Serve's proxy has an ingress's port: they would share it, and the clients."""
    if port == proxy_port:
        raise HttpPortError(
            f"port {port} is that of Serve's own HTTP proxy: set proxy_location: Disabled at the top of the "
            "config, as clients connect to ingresses; or give one of them another port (http_options.port, "
            "ingresses.port); or set ingresses.http to serve"
        )


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


class HttpServer:
    """Serves one ASGI application. Belongs to one event loop."""

    def __init__(self, app: ASGIApp, settings: IngressSettings, limits: Limits) -> None:
        """Open the port. Raises HttpPortError."""
        self._listener = listen(settings.host, settings.port)
        bounds = ConnectionBounds(
            settings.header_timeout_s,
            limits.max_header_bytes,
            limits.slow_reader_timeout_s,
            "ingresses.header_timeout_s",
            "limits.max_header_bytes",
        )
        connection = partial(Connection, bounds=bounds)
        config = uvicorn.Config(
            app,
            http=connection,  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=settings.keep_alive_s,
        )
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self._server.server_state.connections)

    def start(self) -> None:
        """Begin to answer requests, on the running event loop."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def drain(self) -> None:
        """Close the port, then wait until all requests are answered. Idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait([self._task])
        self._listener.close()


class Connection(HttpToolsProtocol):
    """One connection, with what uvicorn leaves out.

    It is closed when a request's headers are too large or too late, and when its client reads nothing for
    long. When the server drains, a request that its client sends before it has noticed is answered, as its last.
    """

    url = b""
    """As much as arrived of the request's path and query; what it inherits sets it with the first byte."""

    def __init__(self, *args: Any, bounds: ConnectionBounds, **options: Any) -> None:
        """The time begins with the connection, or with the first byte of a later request."""
        super().__init__(*args, **options)
        self._bounds = bounds
        self._header_timer: asyncio.TimerHandle | None = None
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
        super().data_received(data)
        # A body that came with the headers was counted, but then they are complete.
        if self._header_timer is not None and self._num_header_bytes > self._bounds.max_header_bytes:
            self._refuse(self._bounds.too_large())

    def on_message_begin(self) -> None:
        """Begin to wait for the rest of the headers."""
        super().on_message_begin()
        if self._header_timer is None:
            self._await_headers()

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        self._stop_timer()
        super().on_headers_complete()
        cast(dict[str, Any], self.scope)[ON_DISCONNECT] = self._watch
        if self._is_last_call and self.cycle is not None:
            self.cycle.keep_alive = False

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
