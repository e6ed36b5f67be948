"""Endpoints about the server: health, load, version, metrics, also under the names of vLLM and SGLang.

/health, /ready, /ping, /load, /version, /metrics, /server_info, and /reset_prefix_cache.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.base.errors import from_client
from deployments.api.http.admin import require_admin
from deployments.api.http.route_table import RouteTable
from deployments.api.http.scopes import request_id
from deployments.api.http.transport import json_response, whole
from deployments.api.routes.health import Readiness, health
from deployments.api.routes.lifecycle import described
from deployments.api.service.api_service import ApiService
from deployments.client.protocol import Unavailable


def add_server_routes(table: RouteTable, service: ApiService) -> None:
    """Register them."""
    routes = _ServerRoutes(service)
    for method in ("GET", "POST"):
        table.add(method, "/ping", routes.ping)
    table.add("GET", "/load", routes.load)
    for name in ("health", "ready", "version", "metrics"):
        table.add("GET", f"/{name}", getattr(routes, name))
    table.add("GET", "/server_info", routes.server_info)
    table.add("POST", "/reset_prefix_cache", routes.reset_prefix_cache)


class _ServerRoutes:
    """The endpoints and the service that they share."""

    def __init__(self, service: ApiService) -> None:
        self._service = service
        self._readiness = Readiness(service)

    async def health(self) -> Response:
        """Report whether requests can be served, and each replica as this process sees it."""
        return json_response(*await health(self._service))

    async def ready(self) -> Response:
        """Report whether a load balancer should send requests to this process."""
        reason = await self._readiness.missing()
        return json_response(
            {"ready": True} if reason is None else {"ready": False, "reason": reason},
            200 if reason is None else 503,
        )

    async def version(self) -> Response:
        """Return the server's version."""
        return json_response({"version": self._service.version})

    async def metrics(self) -> Response:
        """Return the Prometheus metrics of the whole application."""
        try:
            text, content_type = await self._service.metrics_text()
        except Unavailable as error:
            return Response(f"{error}\n", 503, {"retry-after": "2"}, "text/plain")
        return whole([text], headers={"content-type": content_type})

    async def ping(self) -> Response:
        """Report only by the status whether requests can be served, as SageMaker requires."""
        return Response(status_code=(await health(self._service))[1])

    async def load(self) -> Response:
        """Return the number of generations that this ingress has not ended."""
        return json_response({"server_load": sum(self._service.access.num_open().values())})

    async def server_info(self, request: Request) -> Response:
        """Describe the application: its version, models and settings, without keys and tenants."""
        if self._service.admin_key_hash is not None:
            require_admin(request, self._service.admin_key_hash)
        models = await asyncio.gather(*map(described, self._service.models.values()))
        return json_response(
            {"version": self._service.version, "models": models, "settings": self._service.settings}
        )

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Have all replicas of a model (`?model=`), or of all models, forget the prefixes that no request uses."""
        require_admin(request, self._service.admin_key_hash)
        name = request.query_params.get("model")
        models = self._service.find_all(name or None)
        try:
            freed = await asyncio.gather(*(served.empty_caches() for served in models))
        except Unavailable as error:
            raise from_client(error, request_id(request.scope)) from None
        return json_response(
            {
                "object": "list",
                "data": [
                    {"id": served.name, "object": "prefix_cache.reset", "freed_pages": pages}
                    for served, pages in zip(models, freed, strict=True)
                ],
            }
        )
