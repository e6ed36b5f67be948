"""An API with all routes, asked with bodies that are compared with what its document says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from deployments.api import ApiService, Limits, TextCodec, create_app
from monitoring.metrics import Metrics
from tests.deployments.support.all_routes import with_all_routes
from tests.deployments.support.scripted_api import MODEL, Client, ScriptedEngine, service_around

USER = {"role": "user", "content": "hi"}
ITEM = {"type": "message", "role": "user", "content": "a"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/conversations": {},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": [ITEM]},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
}
"""The least body of each endpoint; /v1/batches answers it with a 404, as there is no such file."""


class Api:
    """An API with all routes, and its document."""

    def __init__(self, codec: TextCodec, files: Path, limits: Limits | None = None) -> None:
        service = with_all_routes(service_around(ScriptedEngine(codec), codec, Metrics(MODEL, "i")), files)
        service = replace(service, limits=limits or Limits())
        self.service: ApiService = service
        self.client = Client(httpx.ASGITransport(create_app(service)))
        self.document: dict[str, Any] = self.client.get("/openapi.json").json()
        self.conversation = self.client.post("/v1/conversations", {}).json()["id"]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        at = path.replace("{conversation_id}", self.conversation)
        named = {"model": MODEL} if "model" in self.schema(path)["properties"] else {}
        return self.client.post(at, {**named, **BODIES[path], **body})

    def takes(self, path: str, body: dict[str, Any]) -> bool:
        """Whether a body is taken for what it is, even if there is no room for its answer in the context."""
        answer = self.post(path, body)
        assert answer.status_code in (200, 400, 404), answer.text
        return answer.status_code != 400 or answer.json()["error"].get("code") == "context_length_exceeded"

    def schema(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self.document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        return self.resolved(found["schema"])

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" not in schema:
            return schema
        found: dict[str, Any] = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found

    def forms(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the forms that a field may have."""
        for form in schema.get("anyOf", [schema]):
            yield self.resolved(form)
