"""GET /v1/cluster/status and /v1/cluster/nodes, which need the admin key if one is configured."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.http.admin import require_admin
from deployments.api.http.route_table import RouteTable
from deployments.api.http.transport import json_response
from deployments.api.service.api_service import ClusterSource


def add_cluster_routes(
    table: RouteTable, cluster: ClusterSource, admin_key_hash: str | None, version: str
) -> None:
    """Register the two endpoints."""

    def check(request: Request) -> None:
        if admin_key_hash is not None:
            require_admin(request, admin_key_hash)

    async def status(request: Request) -> Response:
        """Describe the cluster as a whole."""
        check(request)
        found = await cluster.status()
        return json_response({**found, "versions": {"raydix": version, **found["versions"]}})

    async def nodes(request: Request) -> Response:
        """Describe each node."""
        check(request)
        return json_response(await cluster.nodes())

    table.add("GET", "/v1/cluster/status", status)
    table.add("GET", "/v1/cluster/nodes", nodes)
