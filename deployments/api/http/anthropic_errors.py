"""Errors as Anthropic's clients know them: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from deployments.api.base.errors import ApiError
from deployments.api.http.scopes import request_id

PATH = "/v1/messages"
"""The path of Anthropic's API, and the beginning of the paths below it."""
ID_HEADER = "request-id"
"""The header in which Anthropic's clients look for a request's id."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The types of errors by status; others are `invalid_request_error` or, from 500, `api_error`."""


def is_ours(path: str) -> bool:
    """Return whether a path is one of Anthropic's API."""
    return path == PATH or path.startswith(f"{PATH}/")


def named(response: Response, request: Request) -> Response:
    """Return a response with its request's id where Anthropic's clients look for it."""
    response.headers[ID_HEADER] = request_id(request.scope)
    return response


def error_object(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """Return the body of an error, which is also the data of a stream's `error` event."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def error_body(error: ApiError, request_id: str | None) -> bytes:
    """Return `error_object` as JSON."""
    return msgspec.json.encode(error_object(error, request_id))
