"""Bounds the bytes of answers that an ingress holds while clients read them, as it bounds requests' bodies.

    a whole answer     takes room for all of it before its head is sent, or the answer is a 429
    a stream           takes room for each event that is large, while that is read, or ends with an error
    SMALL_BYTES        are not counted, in one piece: a connection itself takes as much

Room is released when the kernel has taken the last byte. A client that keeps reading takes it for milliseconds.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.base.errors import ApiError, invalid
from deployments.api.http.access import tenant_in
from deployments.api.http.body_memory import BodyMemory, BodyRoom, overloaded
from deployments.api.http.scopes import address_of, has_reader

SMALL_BYTES = 2**14
"""As much is sent without room."""
_ROOM = "raydix.unread_room"


class UnreadMemory(BodyMemory):
    """The room for answers that wait to be read from one service."""

    def _refusal(self, num_bytes: int) -> ApiError:
        if num_bytes > self._most_each:
            message = (
                f"The answer has {num_bytes} bytes, more than may wait for one client to read them "
                f"({self._most_each}, a share of limits.max_unread_bytes): request less per answer."
            )
            return invalid(message, code="answer_too_large")
        return overloaded(
            "The answers that clients have not read take all the room for them "
            f"({self._most_each} for one client, {self._max_bytes} for all; limits.max_unread_bytes): read the "
            "answers that were asked for, and retry later."
        )


class Readers:
    """Middleware that gives each request of a client a room for the memory of its answer."""

    def __init__(self, app: ASGIApp, memory: UnreadMemory, *, has_tenants: bool) -> None:
        """The room belongs to the request's tenant, or to its address where there are no tenants."""
        self._app, self._memory, self._has_tenants = app, memory, has_tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and has_reader(scope):
            scope[_ROOM] = self._memory, tenant_in(scope).name if self._has_tenants else address_of(scope)
        await self._app(scope, receive, send)


_OF_NOBODY = BodyMemory(2**62, has_tenants=False)
"""For answers that no client reads."""


def unread_room(scope: Scope) -> BodyRoom:
    """Return a room for the memory of an answer to the request of this scope. `take` raises `ApiError` 400 or
    429."""
    found: tuple[BodyMemory, str] = scope.get(_ROOM, (_OF_NOBODY, ""))
    memory, owner = found
    return memory.open(owner)
