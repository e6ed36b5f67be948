"""The scripted service with a model that embeds and judges, and does not generate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, Limits, create_app
from engine.model_config.tasks import Task
from tests.deployments.support.scripted_api import Client, ScriptedEngine

SIZE = 4
Make = Callable[..., "Pooled"]


class Pooled:
    """A client, and the engine with scripted values."""

    def __init__(self, service: ApiService, engine: ScriptedEngine) -> None:
        self.engine, self.service = engine, service
        self.client = Client(httpx.ASGITransport(create_app(service)))

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(path, {"model": "demo", **fields})

    def answer(self, path: str, **fields: Any) -> dict[str, Any]:
        response = self.post(path, **fields)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def refused(self, path: str, **fields: Any) -> tuple[str, str]:
        """Return the field and the message of a 400, of which no engine has heard."""
        heard = len(self.engine.requests)
        response = self.post(path, **fields)
        assert response.status_code == 400, response.text
        assert len(self.engine.requests) == heard
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        return str(error["param"]), str(error["message"])


@pytest.fixture
def make(service: ApiService, engine: ScriptedEngine) -> Make:
    """Return a function that makes the service for some tasks, with limits."""

    def of(*tasks: Task, max_model_len: int = 512, **limits: Any) -> Pooled:
        models = {
            name: replace(
                served,
                card=replace(served.card, tasks=tasks, hidden_size=SIZE, max_model_len=max_model_len),
            )
            for name, served in service.models.items()
        }
        return Pooled(replace(service, models=models, limits=Limits(**limits)), engine)

    return of


@pytest.fixture
def embedder(make: Make) -> Pooled:
    return make("embed")
