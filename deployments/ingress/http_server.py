"""The HTTP server inside an ingress: clients connect to it directly, without a proxy.

    client ──▶ a port that all ingresses of a machine share (SO_REUSEPORT) ──▶ uvicorn in one of them ──▶ the API

The kernel gives each new connection to one of the ingresses that listen. A new one takes the port first, so that
it fails immediately if another program has it, and listens when it can answer (`opening.py`). An ingress that is
being stopped says so at /ready, closes its listener after `shutdown_delay_s`, and ends when its streams have.
"""

from __future__ import annotations

import asyncio
import os
import socket

import uvicorn
from starlette.types import ASGIApp

from deployments.config.limits import Limits
from deployments.config.settings import IngressSettings
from deployments.http_server.connection import ConnectionBounds, protocols
from deployments.ingress.closing import take_queued

BACKLOG = 2048
"""Connections that the kernel holds until they are accepted."""


class HttpPortError(RuntimeError):
    """The ingress cannot listen on its port; the message names the port, the setting, and what to do."""


def take_port(host: str, port: int) -> socket.socket:
    """Return a socket with a port that other ingresses of this machine may share; it does not listen yet.

    Raises HttpPortError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            taken.bind(address)
        except OSError:
            taken.close()
            raise
    except OSError as error:
        raise _port_error(host, port, error) from None
    return taken


def _port_error(host: str, port: int, error: OSError) -> HttpPortError:
    reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
    return HttpPortError(
        f"an ingress cannot listen on {host}:{port} ({reason}): set ingresses.port to a port that no other "
        "program uses, and ingresses.host to an address of the ingress's node"
    )


def check_proxy(port: int, proxy_port: int | None) -> None:
    """Raise HttpPortError if Serve's proxy has an ingress's port: they would share it, and the clients."""
    if port == proxy_port:
        raise HttpPortError(
            f"port {port} is that of Serve's own HTTP proxy, but clients connect to ingresses: set "
            "proxy_location: Disabled at the top of the config; or change a port (http_options.port, "
            "ingresses.port); or set ingresses.http to serve"
        )


class HttpServer:
    """Serves one ASGI application. Belongs to one event loop."""

    def __init__(self, app: ASGIApp, settings: IngressSettings, limits: Limits) -> None:
        """Take the port. Raises HttpPortError."""
        self._host, self._port = settings.host, settings.port
        self._listener = take_port(settings.host, settings.port)
        self._header_timeout_s = settings.header_timeout_s
        self.take_over(limits)
        config = uvicorn.Config(
            app,
            http=protocols(lambda: self._bounds),  # type: ignore[arg-type]  # uvicorn only calls it
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

    def take_over(self, limits: Limits) -> None:
        """Bound the connections that come from now on by these limits."""
        self._bounds = ConnectionBounds(
            self._header_timeout_s,
            limits.max_header_bytes,
            limits.max_headers,
            limits.slow_reader_timeout_s,
            limits.slow_reader_min_bytes_per_s,
            "ingresses.header_timeout_s",
            "limits.max_header_bytes",
            "limits.max_headers",
        )

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self._server.server_state.connections)

    async def is_served_by_others(self) -> bool:
        """Return whether another process listens on the port. Ask before `start`."""
        with socket.socket(self._listener.family, socket.SOCK_STREAM) as client:
            client.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(client, self._listener.getsockname())
            except OSError:
                return False
            return True

    def start(self) -> None:
        """Begin to listen and to answer requests, on the running event loop. Raises HttpPortError."""
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:
            raise _port_error(self._host, self._port, error) from None
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def drain(self) -> None:
        """Close the port, then wait until all requests are answered. Idempotent."""
        if self._task is not None:
            if self._listener.fileno() >= 0:
                await take_queued(self._listener)
                for server in getattr(self._server, "servers", ()):  # none if it has not begun yet
                    server.close()
            self._server.should_exit = True
            await asyncio.wait([self._task])
        self._listener.close()
