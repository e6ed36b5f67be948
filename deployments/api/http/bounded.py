"""Refuses requests while too many are open, if no proxy before the API does. No tenant gets all places.

A request takes its place when its body has arrived. Before that it costs little: a connection, and the room for
what has arrived (`deployments/api/http/body_memory.py`). So bodies that never end keep no request out. Unfinished
ones are bounded too, by as many for each tenant, or for each address on an open server.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.base.errors import RETRY_AFTER_S, ApiError
from deployments.api.http.access import OPEN_PATHS, tenant_in
from deployments.api.http.error_response import error_response
from deployments.api.http.scopes import address_of, header, is_deferrable, route_path


@dataclass(slots=True)
class OpenRequests:
    """How many requests are open, which outlives a change of the layers around them."""

    num_open: int = 0
    num_open_of: Counter[str] = field(default_factory=Counter)
    """By tenant."""
    num_unfinished_of: Counter[str] = field(default_factory=Counter)
    """Those whose bodies have not arrived, by tenant, or by address on an open server. They are not counted above.
    """


class Bounded:
    """The ASGI middleware that counts open requests. Only POST is refused: health and metrics always answer.

    Requests of batches, which have bounds of their own, take no places of clients.
    """

    def __init__(
        self, app: ASGIApp, max_open: int, *, num_tenants: int = 0, counts: OpenRequests | None = None
    ) -> None:
        """With several tenants, each may have half of the places. The scope has the tenant by now."""
        self._app, self._max_open, self._has_tenants = app, max_open, num_tenants > 0
        self._max_each = max_open - max_open // 2 if num_tenants > 1 else max_open
        self._counts = counts or OpenRequests()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with a 429."""
        is_bounded = scope["type"] == "http" and scope["method"] == "POST" and route_path(scope) not in OPEN_PATHS
        if not is_bounded or is_deferrable(scope):
            await self._app(scope, receive, send)
            return
        tenant = tenant_in(scope).name
        place = _Place(self, tenant, tenant if self._has_tenants else address_of(scope))
        try:
            self._check(tenant)
            if not _announces_body(scope):
                place.take()
            else:
                place.await_body()
                receive = place.receiving(receive)
        except ApiError as refused:
            await error_response(refused, scope)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            place.leave()

    def _check(self, tenant: str) -> None:
        """Raise `ApiError` 429 when a tenant gets no place now."""
        num_open = self._counts.num_open
        is_full = num_open >= self._max_open
        if is_full or self._counts.num_open_of[tenant] >= self._max_each:
            whose = "The server has" if is_full else f"The tenant {tenant!r} has"
            limit = f"the most{'' if is_full else ' for one tenant'} (ingresses.max_ongoing)"
            raise _refused(f"{whose} {num_open if is_full else self._max_each} open requests, {limit}")


class _Place:
    """A request's share of the bounds."""

    def __init__(self, bounds: Bounded, tenant: str, owner: str) -> None:
        self._bounds, self._counts = bounds, bounds._counts
        self._tenant, self._owner = tenant, owner
        self._is_unfinished = self._is_taken = False

    def await_body(self) -> None:
        """Count a body that has not arrived. Raises `ApiError` 429 when its owner has too many of them."""
        max_open = self._bounds._max_open
        if self._counts.num_unfinished_of[self._owner] >= max_open:
            most = f"{max_open} bodies that have not arrived, the most that are allowed (ingresses.max_ongoing)"
            raise _refused(f"You are sending {most}; finish them")
        self._counts.num_unfinished_of[self._owner] += 1
        self._is_unfinished = True

    def receiving(self, receive: Receive) -> Receive:
        """Return `receive`, which takes the place with the end of the body. It then may raise `ApiError` 429."""

        async def received() -> Message:
            message = await receive()
            is_last = message["type"] == "http.request" and not message.get("more_body", False)
            if self._is_unfinished and is_last:
                self._has_arrived()
                self._bounds._check(self._tenant)
                self.take()
            return message

        return received

    def take(self) -> None:
        """Take the place."""
        self._counts.num_open += 1
        self._counts.num_open_of[self._tenant] += 1
        self._is_taken = True

    def leave(self) -> None:
        """Release the place."""
        self._has_arrived()
        if self._is_taken:
            self._counts.num_open -= 1
            self._counts.num_open_of[self._tenant] -= 1

    def _has_arrived(self) -> None:
        if self._is_unfinished:
            self._is_unfinished = False
            self._counts.num_unfinished_of[self._owner] -= 1
            if not self._counts.num_unfinished_of[self._owner]:
                del self._counts.num_unfinished_of[self._owner]


def _announces_body(scope: Scope) -> bool:
    length = header(scope, b"content-length")
    return header(scope, b"transfer-encoding") is not None or (length or "0").strip("0") != ""


def _refused(message: str) -> ApiError:
    headers = {"retry-after": f"{RETRY_AFTER_S:.0f}"}
    return ApiError(429, f"{message}; retry later.", code="too_many_open_requests", headers=headers)
