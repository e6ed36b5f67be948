"""Decides which web pages may use the API, by the host name of a request and the site that sent it.

A page of any site can send requests to a server on its reader's own machine. A browser hides the answers from the
page, unless the site's own name resolves to that machine ("DNS rebinding"): then the Host header has that name. So
the names are checked, and pages of other sites need a declaration:

    Host      one of `ingresses.allowed_hosts`, or 421
    Origin    one of `ingresses.cors_origins`: its pages may send any request and read the answers
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.base.errors import ApiError, quoted
from deployments.api.http.error_response import error_response

MAX_AGE_S = 600
"""Seconds for which a browser need not ask again whether a page may send its requests."""
_METHODS = b"GET, HEAD, POST, DELETE"
_EXPOSED = (
    b"retry-after, x-request-id, request-id, x-raydix-replica, x-raydix-cached-tokens, x-raydix-decision, "
    b"x-raydix-ignored-fields, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_MAX_SEEN = 256


class Origins:
    """The ASGI middleware that checks Host and answers for declared origins."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None, origins: Sequence[str]) -> None:
        """`hosts` are as `deployments.config.hosts.check_host` takes them, or None for any host; `origins` as
        `check_origin` does.
        """
        self._app = app
        self._hosts = None if hosts is None or "*" in hosts else _Hosts(hosts)
        self._origins = frozenset(origin.encode() for origin in origins)
        self._seen: set[bytes] = set()  # accepted Host headers, because clients repeat theirs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, answer a browser that asks beforehand, or answer with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host = origin = asked_method = asked_headers = None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"access-control-request-method":
                asked_method = value
            elif name == b"access-control-request-headers":
                asked_headers = value
        error = None if host is None or host in self._seen else self._check(host)
        if error is not None:
            await error_response(error, scope)(scope, receive, send)
            return
        if origin is None:
            await self._app(scope, receive, send)
            return
        is_declared = origin in self._origins or b"*" in self._origins
        if scope["method"] == "OPTIONS" and asked_method is not None:
            if not is_declared:
                await error_response(undeclared(origin), scope)(scope, receive, send)
                return
            await _let(origin, asked_headers, send)
            return
        await self._app(scope, receive, _with_headers(send, origin) if is_declared else send)

    def _check(self, host: bytes) -> ApiError | None:
        if self._hosts is not None and not self._hosts.have(host.decode("latin-1")):
            return ApiError(
                421,
                f"This server does not have the name {quoted(host.decode('latin-1'))}: use one of its names, or "
                "add this one to ingresses.allowed_hosts.",
                code="host_not_allowed",
            )
        if len(self._seen) < _MAX_SEEN:
            self._seen.add(host)
        return None


class _Hosts:
    """A set of hosts, given by names, patterns, addresses and networks."""

    def __init__(self, given: Sequence[str]) -> None:
        self._names: set[str] = set()
        self._suffixes: list[str] = []
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for each in given:
            try:
                self._networks.append(ipaddress.ip_network(each))
            except ValueError:
                name = each.lower().rstrip(".")
                if name.startswith("*."):
                    self._suffixes.append(name[1:])
                else:
                    self._names.add(name)

    def have(self, header: str) -> bool:
        """Whether a Host header names one of them; its port does not matter."""
        name = header[1:].partition("]")[0] if header.startswith("[") else header.rpartition(":")[0] or header
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            name = name.lower().rstrip(".")
            return name in self._names or any(name.endswith(suffix) for suffix in self._suffixes)
        return any(address in network for network in self._networks)


def undeclared(origin: bytes) -> ApiError:
    """Create the error of a page that may not use the API."""
    return ApiError(
        403,
        f"Pages of {quoted(origin.decode('latin-1'))} may not use this server: add this origin to "
        "ingresses.cors_origins to let them.",
        code="origin_not_allowed",
    )


async def _let(origin: bytes, asked_headers: bytes | None, send: Send) -> None:
    """Tell a browser that pages of this origin may send the request that it asks for."""
    headers = [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-max-age", str(MAX_AGE_S).encode()),
        (b"vary", b"origin, access-control-request-headers"),
    ]
    if asked_headers is not None:
        headers.append((b"access-control-allow-headers", asked_headers))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _with_headers(send: Send, origin: bytes) -> Send:
    """Return a `send` that lets pages of this origin read the answer."""

    async def send_readable(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message.get("headers", ()),
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"origin"),
            ]
        await send(message)

    return send_readable
