"""Errors, in the form that OpenAI's clients know: {"error": {"message", "type", "param", "code"}} and a status.

`deployments.api.http.error_response` answers with them, and knows which paths have another form.

Messages are written here or at the check that raises them, never taken from an exception of unknown origin, whose
text belongs in the log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import msgspec

from deployments.admission.rate_limits import RateLimited
from deployments.api.base.shortages import shortage
from deployments.client.protocol import (
    EndsEngines,
    FailsSteps,
    Overloaded,
    Rejected,
    ReplicaLost,
    TakenOver,
    Unavailable,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 2.0
"""Seconds in Retry-After when no engine can take a request for an unknown time."""

_NO_RETRY = {"x-should-retry": "false"}
"""Keeps OpenAI's clients from sending a request again, as they do after other errors of the server."""
_TYPES = {
    404: "not_found_error",
    405: "method_not_allowed_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error response. `param` is the dotted path of the field at fault, if there is one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = _TYPES.get(status, "invalid_request_error")
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self, request_id: str | None = None) -> bytes:
        """Return the error object as JSON. In a stream it has the `request_id` that responses have in a header."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if request_id is not None:
            error["request_id"] = request_id
        return msgspec.json.encode({"error": error})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Create a 400: the request is wrong, and sending it again would not help."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(asked: str, served: Iterable[str]) -> ApiError:
    """Create a 404 that names the models which this server has."""
    names = ", ".join(repr(name) for name in served)
    message = f"The model {quoted(asked)} does not exist here; this server serves {names}."
    return ApiError(404, message, param="model", code="model_not_found")


def internal(request_id: str) -> ApiError:
    """Create a 500 for a failure of ours; the log has the details under this id."""
    return ApiError(500, f"Internal error. The server's log has more under request id {request_id}.")


def unexpected(error: BaseException, request_id: str) -> ApiError:
    """Translate an exception that no check foresaw; where the machine is short of something, say so."""
    lacking = shortage(error)
    if lacking is None:
        return internal(request_id)
    return ApiError(lacking.status, lacking.message, code=lacking.code, headers=_retry_after(RETRY_AFTER_S))


def log_failure(error: Exception, what: str) -> None:
    """Log why `what` failed: a defect with its traceback, any other failure in one line."""
    if shortage(error) is None and not isinstance(error, ApiError):
        logger.error("%s failed", what, exc_info=error)
    else:
        logger.warning("%s failed: %s", what, error)


def from_client(error: Exception, request_id: str) -> ApiError:
    """Translate an exception of an `EngineClient`. Retry-After keeps clients from amplifying an overload."""
    if isinstance(error, Rejected):
        return invalid(error.message, error.param)
    if isinstance(error, Overloaded):
        headers = _retry_after(error.retry_after_s)
        status = 503 if error.kind == "deadline" else 429
        return ApiError(status, f"The server is overloaded: {error.reason}.", code="overloaded", headers=headers)
    if isinstance(error, RateLimited):
        headers = error.headers | _retry_after(error.retry_after_s)
        return ApiError(429, error.message, code="rate_limit_exceeded", headers=headers)
    if isinstance(error, Unavailable):
        headers = _retry_after(RETRY_AFTER_S)
        return ApiError(503, f"The service is unavailable: {error.reason}.", code="unavailable", headers=headers)
    if isinstance(error, TakenOver):
        return ApiError(409, "Another reader continues this stream.", code="taken_over")
    if isinstance(error, ReplicaLost):
        headers = _retry_after(RETRY_AFTER_S)
        message = (
            "The engine that generated this answer was lost, and no other continued it (health.max_migrations, "
            "health.migration_wait_s); send the request again."
        )
        return ApiError(503, message, code="engine_lost", headers=headers)
    if isinstance(error, FailsSteps):
        message = (
            f"The engine failed on this request, {error.num_steps} times (health.max_lost_replicas_per_request); "
            "do not send it again as it is."
        )
        return ApiError(500, message, code="engine_error", headers=_NO_RETRY)
    if isinstance(error, EndsEngines):
        message = (
            f"{error.num_replicas} engines died in turn while they computed this request, so no other "
            "engine gets it (health.max_lost_replicas_per_request); do not send it again as it is."
        )
        return ApiError(500, message, code="ends_engines", headers=_NO_RETRY)
    return unexpected(error, request_id)


def quoted(value: object, longest: int = 64) -> str:
    """Format a client's value for a message, cut to `longest` characters."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = value if isinstance(value, str) else repr(value)
    cut = text if len(text) <= longest else text[:longest] + "…"
    return repr(cut) if isinstance(value, str) else cut


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}
