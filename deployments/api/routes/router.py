"""GET /v1/router/decisions: the router's last decisions and their reasons, for administrators."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.base.errors import invalid
from deployments.api.http.admin import require_admin
from deployments.api.http.route_table import RouteTable
from deployments.api.http.transport import json_response
from deployments.api.service.api_service import ApiService

MAX_DECISIONS = 10_000
DEFAULT_DECISIONS = 100


def add_router_routes(table: RouteTable, service: ApiService) -> None:
    """Register GET /v1/router/decisions."""

    async def decisions(request: Request) -> Response:
        """Return this ingress's last placements, newest first, with every cost term and the outcome.

        Query: `limit` (100), `model` (all of them).
        """
        require_admin(request, service.admin_key_hash)
        limit = _limit(request.query_params.get("limit"))
        name = request.query_params.get("model")
        models = service.find_all(name or None)
        records = [record for served in models for record in served.client.decisions(limit)]
        records.sort(key=lambda record: float(record.get("at", 0.0)), reverse=True)
        return json_response({"object": "list", "data": records[:limit]})

    table.add("GET", "/v1/router/decisions", decisions)


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_DECISIONS
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= MAX_DECISIONS and len(text) <= 5):
        raise invalid(f"limit must be an integer from 1 to {MAX_DECISIONS}.", "limit")
    return int(text)
