"""Errors as responses, in the form of the API that a request's path belongs to.

Layers that refuse a request know no more of it than its scope, so the path decides: Anthropic's API has its own
form, and all other paths have that of OpenAI's.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from deployments.api.base.errors import ApiError
from deployments.api.http import anthropic_errors as anthropic
from deployments.api.http.scopes import note_error, request_id, route_path


def error_response(error: ApiError, scope: Scope) -> Response:
    """Create the response of an error to the request of this scope."""
    note_error(scope, error.message)
    path, name = route_path(scope), request_id(scope)
    headers = error.headers | {anthropic.ID_HEADER: name} if anthropic.is_ours(path) else error.headers
    return Response(error_body(error, path, name), error.status, headers, "application/json")


def error_body(error: ApiError, path: str, name: str | None = None) -> bytes:
    """Return an error's JSON; `name` is the request's id, None before it has one."""
    return anthropic.error_body(error, name) if anthropic.is_ours(path) else error.body()
