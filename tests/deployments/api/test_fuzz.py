"""Whatever JSON arrives, the answer is an answer or a 400-class error, never a 500."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.api.anthropic.protocol import MessagesRequest
from deployments.api.fields.protocol import ChatRequest, CompletionRequest
from deployments.api.responses.protocol import ResponsesRequest
from tests.deployments.support.scripted_api import Client
from tests.support.examples import examples

numbers = st.one_of(st.integers(), st.floats(), st.integers(-2, 30))
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20))
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=8), v, max_size=4), max_leaves=8
)
names = st.sampled_from(
    sorted(
        {*ChatRequest.model_fields, *CompletionRequest.model_fields, "tools", "user", "response_format"}
        - {"model"}
    )
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "x"]), "content": st.text(max_size=30)}
    ),
    max_size=3,
)
changes = st.dictionaries(names | st.text(max_size=10), values, max_size=4)
_settings = settings(
    max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@_settings
@given(changes, messages)
def test_chat_never_fails(client: Client, change: dict[str, Any], conversation: list[Any]) -> None:
    check(client, "/v1/chat/completions", {"model": "demo", "messages": conversation} | change)


@_settings
@given(changes, st.one_of(st.text(max_size=50), st.lists(st.integers(-1, 4097), max_size=9), values))
def test_completions_never_fail(client: Client, change: dict[str, Any], prompt: Any) -> None:
    check(client, "/v1/completions", {"model": "demo", "prompt": prompt} | change)


blocks = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"]),
            "text": values, "id": values, "name": st.text(max_size=5), "input": values, "tool_use_id": values,
            "content": values | st.text(max_size=5), "thinking": values, "is_error": values,
        },
    ),
    max_size=3,
)  # fmt: skip
turns = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": blocks | values}
    ),
    max_size=3,
)
fields = st.dictionaries(
    st.sampled_from(sorted(MessagesRequest.model_fields)) | st.text(max_size=10), values | blocks, max_size=4
)


@_settings
@given(fields, turns | messages)
def test_messages_never_fail(client: Client, change: dict[str, Any], conversation: list[Any]) -> None:
    body = {"model": "demo", "max_tokens": 5, "messages": conversation} | change
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = client.post(path, json.dumps(body).encode("utf-8", "surrogatepass"))
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()) == {"type", "error", "request_id"}


items = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                ["message", "function_call", "function_call_output", "reasoning", "item_reference", "x"]
            ),
            "role": st.sampled_from(["user", "assistant", "system", "x"]), "content": values | blocks,
            "id": values, "call_id": values | st.text(max_size=5), "name": values | st.text(max_size=5),
            "arguments": values | st.text(max_size=5), "output": values | blocks, "summary": values | blocks,
        },
    ),
    max_size=3,
)  # fmt: skip
response_fields = st.dictionaries(
    st.sampled_from(sorted({*ResponsesRequest.model_fields} - {"background"})) | st.text(max_size=10),
    values | items,
    max_size=4,
)


@_settings
@given(response_fields, items | values)
def test_responses_never_fail(client: Client, change: dict[str, Any], given: Any) -> None:
    check(client, "/v1/responses", {"model": "demo", "input": given} | change)


@_settings
@given(st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
def test_no_body_causes_an_internal_error(client: Client, body: bytes) -> None:
    for path in ("/v1/completions", "/tokenize", "/detokenize", "/v1/messages", "/v1/responses"):
        response = client.post(path, body)
        assert response.status_code < 500, response.text


def check(client: Client, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, json.dumps(body).encode("utf-8", "surrogatepass"))
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
