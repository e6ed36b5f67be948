"""The scripted service, asked by Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from deployments.api import Limits
from tests.deployments.api.dialects.conftest import Talk, talk

__all__ = ["talk"]

MESSAGES = "/v1/messages"
ASK: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 300,
    "messages": [{"role": "user", "content": "Is it raining in Oslo?"}],
}
Event = tuple[str, dict[str, Any]]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool with an input of these schemas, all required."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": f"Does {name}.", "input_schema": schema | {"additionalProperties": False}}


WEATHER = tool("get_weather", city={"type": "string", "maxLength": 12})
CLOCK = tool("clock", zone={"enum": ["utc", "local"]})


class Messages:
    """A client, and the engine with scripted answers."""

    def __init__(self, it: Talk) -> None:
        self.talk, self.engine = it, it.engine

    def post(self, path: str = MESSAGES, /, **change: Any) -> httpx.Response:
        asked = {name: value for name, value in (ASK | change).items() if value is not ...}
        return self.talk.client.post(path, asked, headers={"anthropic-version": "2023-06-01"})

    def whole(self, **change: Any) -> dict[str, Any]:
        """An answer in one piece."""
        response = self.post(**change)
        assert response.status_code == 200, response.text
        message: dict[str, Any] = response.json()
        return message

    def events(self, **change: Any) -> list[Event]:
        """A stream's events, in the order that Anthropic's documentation gives."""
        response = self.post(**change, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        return events_of(response.text)

    def streamed(self, **change: Any) -> dict[str, Any]:
        """A stream as Anthropic's clients put it together."""
        return put_together(self.events(**change))

    def counted(self, **change: Any) -> int:
        """The number of tokens that count_tokens finds."""
        response = self.post(f"{MESSAGES}/count_tokens", **{"max_tokens": ..., **change})
        assert response.status_code == 200, response.text
        (count,) = response.json().values()
        assert response.json() == {"input_tokens": count}
        return int(count)

    def refused(self, **change: Any) -> str:
        """Return the message of a bad request's error, which must not have reached any engine."""
        heard = len(self.engine.requests)
        response = self.post(**change)
        assert response.status_code == 400, response.text
        assert len(self.engine.requests) == heard
        error = response.json()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        return str(error["error"]["message"])


def events_of(text: str) -> list[Event]:
    events = []
    for lines in text.split("\n\n")[:-1]:
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append((event["type"], event))
    return events


GAINS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "thinking"),
    "input_json_delta": ("partial_json", "tool_use"),
}
"""What a delta brings, and the blocks that it may come in."""


def put_together(events: list[Event]) -> dict[str, Any]:
    """Return the message of a stream. Asserts that its events come in an order that clients rely on."""
    (first, start), *rest = [event for event in events if event[0] != "ping"]
    assert first == "message_start"
    message: dict[str, Any] = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    block: dict[str, Any] | None = None
    json_text = ""
    for name, event in rest[:-2]:
        if name == "content_block_start":
            assert block is None and event["index"] == len(message["content"])
            block, json_text = event["content_block"], ""
            message["content"].append(block)
            continue
        assert block is not None and event["index"] == len(message["content"]) - 1
        if name == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = json.loads(json_text or "{}")
            block = None
            continue
        assert name == "content_block_delta"
        delta = event["delta"]
        field, kind = GAINS[delta["type"]]
        assert block["type"] == kind
        if field == "partial_json":
            json_text += delta[field]
        else:
            block[field] += delta[field]
    assert block is None
    (changed, change), (stopped, _) = rest[-2:]
    assert (changed, stopped) == ("message_delta", "message_stop")
    return {**message, **change["delta"], "usage": change["usage"]}


def alike(it: Messages, **change: Any) -> dict[str, Any]:
    """Return an answer, once it is known to be the same whole and streamed but for what is new in each."""
    whole, streamed = it.whole(**change), it.streamed(**change)
    for message in (whole, streamed):
        assert message.pop("id").startswith("msg_")
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("toolu_")
            elif block["type"] == "thinking":
                assert block.pop("signature")
    assert whole == streamed
    return whole


@pytest.fixture
def ask(talk: Callable[..., Talk]) -> Callable[..., Messages]:
    """A service on the embedded model's tokenizer, with `template` in place of its own where one is given."""

    def make(template: str | None = None, limits: Limits | None = None, **options: Any) -> Messages:
        return Messages(talk(template, limits, **options))

    return make
