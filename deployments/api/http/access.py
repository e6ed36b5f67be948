"""Who may do what: every request passes `Gate`, which finds its tenant by its API key or answers 401.

Closed by default: only the paths in `OPEN_PATHS` need no key, whatever routes there are. Keys and what was sent in
their place appear in no answer and no log.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.admission.rate_limits import TenantLimits, Ticket
from deployments.api.errors import ApiError
from deployments.api.http.admin import require_admin
from deployments.api.http.transport import error_response
from deployments.config.tenants import ANONYMOUS, KeyRing, Tenant
from monitoring.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
"""Probes and scrapers have no key; `metrics_key_hash` closes the last one."""
MAX_KEY_CHARS = 512
_TENANT = "raydix.tenant"


class AccessControl:
    """The keys and limits of one process's API."""

    def __init__(
        self,
        keys: KeyRing | None = None,
        num_ingresses: int = 1,
        *,
        metrics_key_hash: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `keys` the service is open. With `metrics_key_hash`, /metrics needs the key with this hash."""
        self._keys = keys or KeyRing()
        self._num_ingresses, self._clock = num_ingresses, clock
        self._metrics_key_hash = metrics_key_hash
        self._limits: dict[str, TenantLimits] = {}

    def identify(self, scope: Scope) -> Tenant:
        """Who sent a request. Raises `ApiError` 401, or 403 for /metrics without the right key.

        An open service does not look at what clients send for a key.
        """
        path = route_path(scope)
        if path == "/metrics" and self._metrics_key_hash is not None:
            require_admin(Request(scope), self._metrics_key_hash)
        if path in OPEN_PATHS or self._keys.is_open:
            return ANONYMOUS
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        tenant = self._keys.find(_bearer_key(given))
        if tenant is None:
            raise unauthenticated("This API key is not known here.")
        return tenant

    def start(self, tenant: Tenant) -> Ticket:
        """A request to generate. Raises `RateLimited`."""
        limits = self._limits.get(tenant.name)
        if limits is None:
            limits = self._limits[tenant.name] = TenantLimits(tenant, self._clock, self._num_ingresses)
        return limits.start()


def tenant_of(request: Request) -> Tenant:
    """The tenant that `Gate` found for a request."""
    tenant = request.scope.get(_TENANT)
    return tenant if isinstance(tenant, Tenant) else ANONYMOUS


def unauthenticated(message: str) -> ApiError:
    """401 as OpenAI's API gives it."""
    hint = 'Send "Authorization: Bearer <your API key>".'
    headers = {"www-authenticate": 'Bearer realm="raydix"'}
    return ApiError(401, f"{message} {hint}", code="invalid_api_key", headers=headers)


class Gate:
    """Lets requests through that may pass, with their tenant in the scope."""

    def __init__(self, app: ASGIApp, access: AccessControl, metrics: Metrics | None = None) -> None:
        self._app, self._access, self._metrics = app, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or answer."""
        if scope["type"] == "http":
            try:
                scope[_TENANT] = self._access.identify(scope)
            except ApiError as error:
                self._count(error)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _count(self, error: ApiError) -> None:
        if self._metrics is not None:
            self._metrics.inc("admission_rejections_total", reason="unauthenticated")
            self._metrics.inc(
                "request_errors_total", endpoint="other", status=str(error.status), error_type=error.type
            )


def _bearer_key(given: list[bytes]) -> str:
    """The key in the Authorization header. Raises `ApiError` 401 that says what is wrong with it."""
    if not given:
        raise unauthenticated("No API key was sent.")
    if len(given) > 1:
        raise unauthenticated("Several Authorization headers were sent.")
    scheme, _, rest = given[0].partition(b" ")
    if scheme.lower() != b"bearer":
        raise unauthenticated("The Authorization header does not begin with Bearer.")
    key = rest.strip(b" ")
    if not 0 < len(key) <= MAX_KEY_CHARS or not all(33 <= byte <= 126 for byte in key):
        what = f"a key is 1 to {MAX_KEY_CHARS} visible ASCII characters without spaces"
        raise unauthenticated(f"The Authorization header holds no possible API key: {what}.")
    return key.decode("ascii")


def route_path(scope: Scope) -> str:
    """The path as routes see it, below the application's route prefix."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
