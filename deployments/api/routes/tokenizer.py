"""GET /tokenizer_info: how a model's tokenizer is configured, in vLLM's form, for tools that count its tokens."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from deployments.api.http.transport import json_response
from deployments.api.service.api_service import ApiService


def add_tokenizer_route(app: FastAPI, service: ApiService) -> None:
    """Add the endpoint."""

    async def tokenizer_info(model: str | None = None) -> Response:
        """Report the configuration of a model's tokenizer, with its chat template."""
        return json_response(service.find(model).codec.tokenizer_info())

    app.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET"])
