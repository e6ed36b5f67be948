"""Serves /metrics from the hub itself, on a port of its own, for scrapers that should not go through an ingress.

Every process that reaches the port can read the metrics; by default only processes on the hub's own node can. Idle
connections are closed, and the number of connections is bounded.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deployments.client.protocol import Unavailable
from deployments.http_server.connection import ConnectionBounds, protocols

HEADER_TIMEOUT_S = 10.0
"""Seconds in which a request's headers must have come."""
UNREAD_S = 10.0
"""Seconds in which a client must read enough of what waits for it."""
MIN_READ_BYTES_PER_S = 240.0
"""How much that is, in bytes per second."""
RETRY_S = 0.25
"""Seconds between two attempts to listen on a port that is in use."""
MAX_HEADER_BYTES = 16 * 2**10
MAX_HEADERS = 100
MAX_CONNECTIONS = 64
"""Connections at a time; requests on further ones are answered with 503."""


class MetricsPortError(RuntimeError):
    """The hub cannot listen on the port; the message names the port, the setting, and what to do."""


def listen(
    host: str, port: int, wait_s: float = 0.0, sleep: Callable[[float], None] | None = None
) -> socket.socket:
    """Open a listening socket. Raises MetricsPortError.

    A port in use is waited for, because the hub before this one may still hold it: at most about `wait_s`.
    """
    waited = 0.0
    while True:
        try:
            return _listener(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or waited >= wait_s:
                raise _unusable(host, port, error, wait_s) from None
        (sleep or time.sleep)(RETRY_S)
        waited += RETRY_S


def _listener(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # The connections of an earlier hub may linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _unusable(host: str, port: int, error: OSError, wait_s: float) -> MetricsPortError:
    reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
    if error.errno == errno.EADDRINUSE and wait_s:
        reason += f", for {wait_s:g} s (metrics.port_wait_s)"
    return MetricsPortError(
        f"cannot serve metrics on {host}:{port} ({reason}): set metrics.port to a free port and metrics.host "
        "to an address of the node that the metrics hub runs on, or leave metrics.port out: /metrics is on "
        "the HTTP port in any case"
    )


class MetricsServer:
    """The HTTP server. Belongs to one event loop."""

    def __init__(self, listener: socket.socket, read_page: Callable[[], Awaitable[tuple[bytes, str]]]) -> None:
        """`read_page` raises Unavailable when there is no page."""
        self._listener, self._read_page = listener, read_page
        app = Starlette(routes=[Route("/metrics", self._metrics, methods=["GET"])])
        bounds = ConnectionBounds(HEADER_TIMEOUT_S, MAX_HEADER_BYTES, MAX_HEADERS, UNREAD_S, MIN_READ_BYTES_PER_S)
        config = uvicorn.Config(
            app,
            http=protocols(lambda: bounds),  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            lifespan="off",
            log_config=None,  # Otherwise it closes Serve's handlers, and no new controller could adopt the hub.
            log_level="warning",
            access_log=False,
            limit_concurrency=MAX_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Address and port that it listens on."""
        host, port, *_ = self._listener.getsockname()
        return host, port

    def start(self) -> None:
        """Begin to answer requests, on the running event loop."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        """Close the port. Idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._listener.close()

    async def _metrics(self, request: Request) -> Response:
        try:
            text, content_type = await self._read_page()
        except Unavailable as error:
            return Response(f"{error}\n", 503, {"retry-after": "2"}, "text/plain")
        return Response(text, headers={"content-type": content_type})
