"""GET /tokenizer_info: how a model's tokenizer is configured, in vLLM's form, for tools that count its tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.http.route_table import RouteTable
from deployments.api.http.transport import json_response
from deployments.api.service.api_service import ApiService


def add_tokenizer_route(table: RouteTable, service: ApiService) -> None:
    """Add the endpoint."""

    async def tokenizer_info(request: Request) -> Response:
        """Report the configuration of a model's tokenizer, with its chat template."""
        return json_response(service.find(request.query_params.get("model")).codec.tokenizer_info())

    table.add("GET", "/tokenizer_info", tokenizer_info)
