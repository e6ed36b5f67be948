"""The scripted service, asked by the Responses API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from deployments.api import Limits, create_app
from tests.deployments.api.dialects.conftest import Talk, talk

__all__ = ["talk"]

RESPONSES = "/v1/responses"
ASK: dict[str, Any] = {"model": "demo", "input": "Is it raining in Oslo?"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Does get_weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}


def events_of(text: str) -> list[dict[str, Any]]:
    """Parse a stream's events; asserts that each names its type twice, and that they are numbered."""
    events: list[dict[str, Any]] = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        events.append(event)
    return events


class Responses:
    """A client, and the engine with scripted answers."""

    def __init__(self, it: Talk) -> None:
        self.talk, self.engine, self.client = it, it.engine, it.client

    def post(self, **change: Any) -> httpx.Response:
        return self.client.post(RESPONSES, ASK | change)

    def whole(self, **change: Any) -> dict[str, Any]:
        """A response in one piece."""
        response = self.post(**change)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def events(self, **change: Any) -> list[dict[str, Any]]:
        """A stream's events."""
        response = self.post(**change, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        return events_of(response.text)

    def streamed(self, **change: Any) -> Any:
        """A stream as the openai client puts it together."""

        async def collect(ai: openai.AsyncOpenAI) -> Any:
            async with ai.responses.stream(**{**ASK, **change}) as stream:
                return await stream.get_final_response()

        return self.client.run(collect)

    def refused(self, **change: Any) -> dict[str, Any]:
        """Return the error of a bad request, which must not have reached any engine."""
        heard = len(self.engine.requests)
        response = self.post(**change)
        assert response.status_code in (400, 404), response.text
        assert len(self.engine.requests) == heard
        error: dict[str, Any] = response.json()["error"]
        return error

    def play(self, scene: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        """Play a scene on one event loop."""

        async def run() -> None:
            transport = httpx.ASGITransport(create_app(self.talk.service))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                await scene(http)

        asyncio.run(run())


@pytest.fixture
def ask(talk: Callable[..., Talk]) -> Callable[..., Responses]:
    """A service with `template` in place of the embedded model's own, where one is given."""

    def make(template: str | None = None, limits: Limits | None = None, **chat: str) -> Responses:
        return Responses(talk(template, limits, **chat))

    return make
