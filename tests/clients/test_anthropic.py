"""anthropic for Python: messages, streams, loops of tools with thinking, counted tokens, errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.support.weather import ANSWER, I_AM, PARIS, SCHEMA, WHO, Station

anthropic = pytest.importorskip("anthropic", reason="`make clients` installs anthropic")
TOOL = {"name": "get_weather", "description": "The weather in a city.", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def client(base_url: str) -> Any:
    return anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)


def ask(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "plain", "max_tokens": 500, "messages": [{"role": "user", "content": content}], **fields}


def test_a_message_is_answered(client: Any) -> None:
    message = client.messages.create(**ask(WHO), system="Be brief.")
    assert [block.text for block in message.content] == [I_AM] and message.stop_reason == "end_turn"
    assert message.usage.input_tokens > 5 and message.usage.output_tokens > 5


def test_a_stream_has_the_same_text(client: Any) -> None:
    with client.messages.stream(**ask(WHO)) as stream:
        assert "".join(stream.text_stream) == I_AM
        assert stream.get_final_message().stop_reason == "end_turn"


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_thinks_calls_and_reports_the_result(client: Any, streams: bool) -> None:
    station, asked = Station(), ask(PARIS, model="agent", tools=[TOOL], thinking={"type": "adaptive"})
    for _ in range(3):
        if streams:
            with client.messages.stream(**asked) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**asked)
        assert message.content[0].type == "thinking"
        asked["messages"].append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            break
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": station.get_weather(**block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        asked["messages"].append({"role": "user", "content": results})
    texts = [block.text.strip() for block in message.content if block.type == "text"]
    assert texts == [ANSWER] and station.asked == ["Paris"]


def test_a_stop_sequence_is_named(client: Any) -> None:
    message = client.messages.create(**ask(WHO), stop_sequences=["script"])
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == "script"


def test_tokens_are_counted_as_they_are_used(client: Any) -> None:
    counted = client.messages.count_tokens(model="plain", messages=ask(WHO)["messages"])
    used = client.messages.create(**ask(WHO)).usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_models_are_listed(client: Any) -> None:
    assert {model.id for model in client.models.list()} >= {"agent", "plain"}


def test_errors_have_the_class_that_belongs_to_them(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**ask(WHO, model="absent"))
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**ask(WHO, max_tokens=0))
