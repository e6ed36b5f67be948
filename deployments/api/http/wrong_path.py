"""Answers requests with a wrong path or method, and suggests the right one."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from deployments.api.base.errors import ApiError, quoted
from deployments.api.http.error_response import error_response
from deployments.api.http.origins import undeclared
from deployments.api.http.scopes import route_path

MOST_NAMED = 3
"""Paths that an error names."""
_COMPARED_CHARS = 128
"""Characters of a path that are compared with others, which takes time that grows with their square."""
_LEAST_LIKENESS = 0.55
_NOT_HERE = {
    "/v1/responses/compact": "this server does not compact conversations; send the items that the model reads, or "
    'truncation: "auto".'
}
"""Paths of OpenAI's API that this server does not have, whose last part must not be read as an id."""


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer requests that the framework refuses: unknown paths, and methods that a path does not support."""
    assert isinstance(error, HTTPException)
    routes: Sequence[BaseRoute] = request.app.routes
    path = route_path(request.scope)
    if error.status_code == 405 and path in _NOT_HERE and request.method != "OPTIONS":
        wrong = ApiError(404, f"There is no path {quoted(path)}: {_NOT_HERE[path]}")
        return error_response(wrong, request.scope)
    if error.status_code == 405:
        return _wrong_method(request, routes)
    if error.status_code == 404:
        return error_response(_unknown(request, routes), request.scope)
    wrong = ApiError(error.status_code, "The request cannot be served.", headers=dict(error.headers or {}))
    return error_response(wrong, request.scope)


def _wrong_method(request: Request, routes: Sequence[BaseRoute]) -> Response:
    allowed = _allowed(request, routes)
    headers = {"allow": ", ".join(allowed)}
    origin = request.headers.get("origin")
    if request.method == "OPTIONS" and origin is not None and "access-control-request-method" in request.headers:
        return error_response(undeclared(origin.encode("latin-1")), request.scope)
    if request.method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    message = f"The method {request.method} is not allowed for this path; use {' or '.join(allowed)}."
    return error_response(ApiError(405, message, headers=headers), request.scope)


def _allowed(request: Request, routes: Sequence[BaseRoute]) -> list[str]:
    found = [route for route in routes if isinstance(route, Route)]
    matching = [route for route in found if route.matches(dict(request.scope))[0] is not Match.NONE]
    same = [route for route in matching if route.path == matching[0].path]  # others match any text
    methods = {method for route in same for method in route.methods or ()}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()) | {"OPTIONS"})


def _unknown(request: Request, routes: Sequence[BaseRoute]) -> ApiError:
    """Create a 404 that names the paths most similar to the requested one, with their methods."""
    methods: dict[str, list[str]] = {}
    for route in routes:
        if isinstance(route, Route):
            methods.setdefault(route.path_format, []).extend(sorted((route.methods or set()) - {"HEAD"}))
    path = route_path(request.scope)
    nearest = get_close_matches(path[:_COMPARED_CHARS], methods, MOST_NAMED, _LEAST_LIKENESS)
    named = ", ".join(f"{'/'.join(methods[one])} {one}" for one in nearest)
    hint = f"did you mean {named}? " if nearest else ""
    return ApiError(404, f"There is no path {quoted(path)}; {hint}GET /docs lists all paths.")
