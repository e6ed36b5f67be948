"""Authentication: every request passes `Gate`, which finds its tenant by the API key or answers 401.

Access is denied by default: only the paths in `OPEN_PATHS` need no key. No response and no log contains keys, or
texts that were sent as keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.admission.rate_limits import TenantLimits, Ticket
from deployments.api.base.errors import ApiError
from deployments.api.http.admin import require_admin
from deployments.api.http.error_response import error_response
from deployments.api.http.scopes import route_path
from deployments.config.tenants import ADMIN, ANONYMOUS, KeyRing, Tenant
from monitoring.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/load", "/version", "/metrics"})
"""Paths for probes, scrapers and load balancers, which have no key; `protects_metrics` closes /metrics."""
MAX_KEY_CHARS = 512
_TENANT = "raydix.tenant"


class AccessControl:
    """The keys and limits of one process's API."""

    def __init__(
        self,
        keys: KeyRing | None = None,
        num_shares: int = 1,
        *,
        protects_metrics: bool = False,
        admin_key_hash: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `keys` the service is open. This process allows one of `num_shares` equal shares of tenants'
        limits. Where `protects_metrics`, /metrics needs the key with this hash.
        """
        self._keys = keys or KeyRing()
        self._num_shares, self._clock = num_shares, clock
        self._protects_metrics, self._admin_key_hash = protects_metrics, admin_key_hash
        self._limits: dict[str, TenantLimits] = {}

    def take_over(self, keys: KeyRing, *, protects_metrics: bool, admin_key_hash: str | None) -> None:
        """Use other keys and tenants from now on. The used part of a tenant's limits stays used."""
        self._keys, self._protects_metrics, self._admin_key_hash = keys, protects_metrics, admin_key_hash
        for name, limits in self._limits.items():
            limits.enforce(self.tenant(name) or limits.tenant, self._num_shares)

    def identify(self, scope: Scope) -> Tenant:
        """Return the tenant that sent a request. Raises `ApiError` 401, or 403 for /metrics without the right key.

        An open service ignores what clients send as a key.
        """
        path = route_path(scope)
        if path == "/metrics" and self._protects_metrics:
            if self._admin_key_hash is None:
                raise _no_admin_for_metrics()
            require_admin(Request(scope), self._admin_key_hash)
        if path in OPEN_PATHS or self._keys.is_open:
            return ANONYMOUS
        tenant = self._keys.find(_key_in(scope["headers"]))
        if tenant is None:
            raise unauthenticated("This API key is not known here.")
        return tenant

    @property
    def weights(self) -> dict[str, float]:
        """The tenants' weights, by name."""
        return self._keys.weights

    @property
    def is_open(self) -> bool:
        """Whether requests without a key are served."""
        return self._keys.is_open

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin key."""
        return self._admin_key_hash is not None

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant with this name; None when there is none."""
        return self._keys.by_name.get(name)

    def check_may_explain(self, tenant: Tenant) -> None:
        """Raise `ApiError` 403 if a router's record would reveal other tenants: it holds the load of every
        replica and what each has cached.
        """
        if len(self._keys.tenants) > 1 and tenant is not ADMIN:
            message = (
                "x-raydix-explain shows the load of all tenants on the replicas, so with more than one "
                "tenant it needs the admin key (admin_key_hash); leave the header out."
            )
            raise ApiError(403, message, code="admin_key_needed")

    def start(self, tenant: Tenant, *, is_charged: bool = True) -> Ticket:
        """Count a request to generate against its tenant's limits (`TenantLimits.start`). Raises `RateLimited`."""
        limits = self._limits.get(tenant.name)
        if limits is None:
            limits = self._limits[tenant.name] = TenantLimits(tenant, self._clock, self._num_shares)
        return limits.start(is_charged=is_charged)

    def num_open(self) -> dict[str, int]:
        """Return the number of generations that have not ended, of each tenant that has sent a request."""
        return {name: limits.num_open for name, limits in self._limits.items()}

    def divide_limits(self, num_shares: int) -> None:
        """Allow one of `num_shares` equal shares of each tenant's limits from now on."""
        self._num_shares = num_shares
        for limits in self._limits.values():
            limits.divide(num_shares)


def tenant_of(request: Request) -> Tenant:
    """Return the tenant that `Gate` found for a request."""
    return tenant_in(request.scope)


def tenant_in(scope: Scope) -> Tenant:
    """Return the tenant that `Gate` found for the request with this scope."""
    tenant = scope.get(_TENANT)
    return tenant if isinstance(tenant, Tenant) else ANONYMOUS


def as_tenant(scope: Scope, tenant: Tenant) -> Scope:
    """Return the scope of a request that is known to be a tenant's: `Gate` then asks for no key."""
    return {**scope, _TENANT: tenant}


def unauthenticated(message: str) -> ApiError:
    """Create a 401 in the form of OpenAI's API."""
    hint = 'Send "Authorization: Bearer <your API key>" or "x-api-key: <your API key>".'
    headers = {"www-authenticate": 'Bearer realm="raydix"'}
    return ApiError(401, f"{message} {hint}", code="invalid_api_key", headers=headers)


def _no_admin_for_metrics() -> ApiError:
    message = (
        "/metrics shows the names of tenants and their usage, so it needs the admin key, and none is set: give "
        "admin_key_hash, or protect_metrics: false to open the page to every client."
    )
    return ApiError(403, message, code="admin_key_not_configured")


class Gate:
    """Middleware that passes on authenticated requests, with their tenant in the scope."""

    def __init__(self, app: ASGIApp, access: AccessControl, metrics: Metrics | None = None) -> None:
        self._app, self._access, self._metrics = app, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with an error."""
        if scope["type"] == "http" and _TENANT not in scope:
            try:
                scope[_TENANT] = self._access.identify(scope)
            except ApiError as error:
                self._count(error)
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _count(self, error: ApiError) -> None:
        if self._metrics is not None:
            self._metrics.inc("admission_rejections_total", reason="unauthenticated")
            self._metrics.inc(
                "request_errors_total", endpoint="other", status=str(error.status), error_type=error.type
            )


def _key_in(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return a request's key, as OpenAI's clients send it or else as Anthropic's do. Raises `ApiError` 401 that
    says what is wrong with it.
    """
    name, given = "Authorization", [value for name, value in headers if name == b"authorization"]
    if given:
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer":
            raise unauthenticated("The Authorization header does not begin with Bearer.")
    else:
        name, given = "x-api-key", [value for name, value in headers if name == b"x-api-key"]
        if not given:
            raise unauthenticated("The request has no API key.")
        key = given[0]
    if len(given) > 1:
        raise unauthenticated(f"The request has several {name} headers.")
    key = key.strip(b" ")
    if not 0 < len(key) <= MAX_KEY_CHARS or not all(33 <= byte <= 126 for byte in key):
        what = f"a key is 1 to {MAX_KEY_CHARS} visible ASCII characters without spaces"
        raise unauthenticated(f"The {name} header has no valid API key: {what}.")
    return key.decode("ascii")
