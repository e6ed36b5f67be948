"""The endpoints that are found by their paths, and their descriptions for /openapi.json.

An endpoint is a function of the request, if it has a parameter of that name, and of the parameters in its path,
which are strings. It returns the response. Its docstring is its description. A plain function runs in a thread.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[..., Any]
Handler = Callable[[Request, Exception], Any]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One method of a path."""

    method: str
    path: str
    endpoint: Endpoint
    body: Callable[[], Mapping[str, Any]]
    is_documented: bool

    @property
    def name(self) -> str:
        return str(self.endpoint.__name__)

    def operation(self) -> dict[str, Any]:
        """Return the OpenAPI operation, without answers."""
        path = _described(self.path)
        parameters = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string", "title": name.replace("_", " ").title()},
            }
            for name in re.findall(r"\{(\w+)\}", path)
        ]
        return {
            "summary": self.name.replace("_", " ").title(),
            "description": inspect.getdoc(self.endpoint) or "",
            "operationId": f"{re.sub(r'[^a-zA-Z0-9_]', '_', self.name + path)}_{self.method.lower()}",
            **({"parameters": parameters} if parameters else {}),
            **_copied(self.body()),
        }


class RouteTable:
    """Endpoints by path and method. If several paths match, the first one that was added is taken."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def add(
        self,
        method: str,
        path: str,
        endpoint: Endpoint,
        *,
        body: Callable[[], Mapping[str, Any]] = dict,
        is_documented: bool = True,
    ) -> None:
        """Add an endpoint. `path` is Starlette's: `/v1/files/{file_id}`. `body` makes the description of the
        request's body, when it is asked for: making all of them takes longer than the rest of the table.
        """
        self._entries.append(_Entry(method, path, endpoint, body, is_documented))

    def paths(self) -> dict[str, dict[str, Any]]:
        """Return the `paths` of an OpenAPI document, without answers."""
        found: dict[str, dict[str, Any]] = {}
        for entry in self._entries:
            if entry.is_documented:
                found.setdefault(_described(entry.path), {})[entry.method.lower()] = entry.operation()
        return found

    def app(self, handlers: Mapping[Any, Handler]) -> Starlette:
        """Return the application that calls the endpoints. `handlers` answer exceptions, by their types."""
        return Starlette(routes=[_route(entry) for entry in self._entries], exception_handlers=handlers)


def _described(path: str) -> str:
    """Return a path as OpenAPI writes it, without the types of its parameters."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _copied(value: Any) -> Any:
    """Copy a description, without the defaults of null that pydantic states for optional fields."""
    if isinstance(value, Mapping):
        return {name: _copied(inner) for name, inner in value.items() if name != "default" or inner is not None}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _route(entry: _Entry) -> Route:
    takes_request = "request" in inspect.signature(entry.endpoint).parameters
    is_async = inspect.iscoroutinefunction(entry.endpoint)

    async def call(request: Request) -> Response:
        request.scope["route"] = route
        given = {**request.path_params, **({"request": request} if takes_request else {})}
        answer: Response = await (
            entry.endpoint(**given) if is_async else run_in_threadpool(entry.endpoint, **given)
        )
        return answer

    route = Route(entry.path, call, methods=[entry.method], name=entry.name)
    # The layer around turns a HEAD into a GET (`spelling`).
    route.methods = {entry.method}
    return route
