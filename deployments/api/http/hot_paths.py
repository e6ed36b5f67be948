"""Calls the endpoints that generate directly, bypassing the framework's layers, which cost as much as an
endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.base.errors import ApiError
from deployments.api.http.error_response import error_response
from deployments.api.http.scopes import route_path

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class _Route:
    """The part of the matched route that metrics read."""

    path: str


class HotPaths:
    """Answers POST requests to some paths itself and passes all others on."""

    def __init__(self, make_rest: Callable[[], ASGIApp], endpoints: Mapping[str, Endpoint]) -> None:
        """`endpoints` has the endpoints by their paths below the application's route prefix. `make_rest` makes the
        application for all other paths when the first such request comes, because a framework takes tens of
        milliseconds to build it.
        """
        self._make_rest = make_rest
        self._rest: ASGIApp | None = None
        self._endpoints = {path: (_Route(path), endpoint) for path, endpoint in endpoints.items()}

    def make(self) -> ASGIApp:
        """Make the application for all other paths now."""
        self._rest = self._make_rest()
        return self._rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        found = None
        if scope["type"] == "http" and scope["method"] == "POST":
            found = self._endpoints.get(route_path(scope))
        if found is None:
            await (self._rest or self.make())(scope, receive, send)
            return
        scope["route"], endpoint = found
        try:
            response = await endpoint(Request(scope, receive))
        except ApiError as error:
            response = error_response(error, scope)
        await response(scope, receive, send)
