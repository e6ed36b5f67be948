"""openai for Python: chats, streams, parsed answers, loops of calls, Responses, completions, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.clients.support.weather import (
    ANSWER,
    ANSWER_TO_BOTH,
    BOTH,
    CITY,
    CITY_SCHEMA,
    DESCRIBE,
    FORM,
    I_AM,
    PARIS,
    SCHEMA,
    TOOL,
    WHO,
    Station,
)

openai = pytest.importorskip("openai", reason="`make clients` installs openai")
pydantic = pytest.importorskip("pydantic")


class City(pydantic.BaseModel):  # type: ignore[name-defined]
    """A city."""

    name: str
    population: int
    rivers: list[str]


@pytest.fixture(scope="module")
def client(api: str) -> Any:
    return openai.OpenAI(base_url=api, api_key="none", max_retries=0)


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_a_chat_continues_after_an_answer_is_sent_back(client: Any) -> None:
    messages: list[Any] = [said("user", WHO)]
    first = client.chat.completions.create(model="plain", messages=messages)
    assert first.choices[0].message.content == I_AM and first.choices[0].finish_reason == "stop"
    second = client.chat.completions.create(
        model="plain", messages=[*messages, first.choices[0].message, said("user", "Sorry?")]
    )
    assert second.choices[0].message.content == "I have told you before."


def test_a_stream_has_the_same_text_and_its_usage(client: Any) -> None:
    stream = client.chat.completions.create(
        model="plain", messages=[said("user", WHO)], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == I_AM
    assert chunks[-1].usage.completion_tokens > 10 and not chunks[-1].choices


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_thinks_calls_and_reports_the_result(client: Any, streams: bool) -> None:
    station, messages = Station(), [said("user", PARIS)]
    for _ in range(3):
        asked = {"model": "agent", "messages": messages, "tools": [TOOL]}
        if streams:
            with client.chat.completions.stream(**asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        assert message.reasoning.strip() in ("The station knows.", "Now I know.")
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = station.get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content.strip() == ANSWER and station.asked == ["Paris"]


def test_two_calls_in_one_answer_are_distinguished(client: Any) -> None:
    messages: list[Any] = [said("user", BOTH)]
    message = client.chat.completions.create(model="agent", messages=messages, tools=[TOOL]).choices[0].message
    calls = [json.loads(call.function.arguments) for call in message.tool_calls]
    assert calls == [{"city": "Paris"}, {"city": "Rome"}]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": Station().get_weather("")}
        for call in message.tool_calls
    ]
    last = client.chat.completions.create(model="agent", messages=[*messages, message, *results], tools=[TOOL])
    assert last.choices[0].message.content.strip() == ANSWER_TO_BOTH


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "City"}}])
def test_a_call_can_be_forced(client: Any, choice: Any) -> None:
    tool = {"type": "function", "function": {"name": "City", "parameters": CITY_SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model="agent", messages=[said("user", FORM)], tools=[tool], tool_choice=choice
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "City" and json.loads(call.function.arguments) == CITY


def test_an_answer_is_parsed_into_a_pydantic_model(client: Any) -> None:
    answer = client.chat.completions.parse(model="plain", messages=[said("user", DESCRIBE)], response_format=City)
    message = answer.choices[0].message
    assert message.parsed == City(**CITY)
    again = client.chat.completions.parse(
        model="plain", messages=[said("user", DESCRIBE), message, said("user", DESCRIBE)], response_format=City
    )
    assert again.choices[0].message.parsed == City(**CITY)


def test_responses_stream_their_events_and_continue_by_id(client: Any) -> None:
    station = Station()
    tools = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}]
    with client.responses.stream(model="agent", input=PARIS, tools=tools) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "response.function_call_arguments.done" in kinds
    (call,) = [item for item in first.output if item.type == "function_call"]
    given = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": station.get_weather(**json.loads(call.arguments)),
    }
    last = client.responses.create(model="agent", input=[given], previous_response_id=first.id, tools=tools)
    assert last.output_text.strip() == ANSWER and station.asked == ["Paris"]
    parsed = client.responses.parse(model="plain", input=DESCRIBE, text_format=City)
    assert parsed.output_parsed == City(**CITY)


def test_completions_list_log_probabilities(client: Any) -> None:
    answer = client.completions.create(model="plain", prompt=WHO, max_tokens=4, logprobs=1)
    scores = answer.choices[0].logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == 4 and scores.text_offset[0] == 0


def test_many_concurrent_requests_are_each_answered(api: str) -> None:
    async def ask_all() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=api, api_key="none", max_retries=0) as client:
            ask = client.chat.completions.create
            return await asyncio.gather(*(ask(model="plain", messages=[said("user", WHO)]) for _ in range(32)))

    assert {answer.choices[0].message.content for answer in asyncio.run(ask_all())} == {I_AM}


def test_errors_have_the_class_and_the_field_that_belong_to_them(client: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="absent", messages=[said("user", WHO)])
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="plain", messages=[said("user", WHO)], temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model="plain", messages=[said("user", WHO * 20_000)])
    assert too_long.value.code == "context_length_exceeded"
