"""/openapi.json describes the bodies that the API takes: generators of clients, and of requests, go by it."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from deployments.api import TextCodec, create_app
from monitoring.metrics import Metrics
from tests.deployments.support.scripted_api import MODEL, Client, ScriptedEngine, service_around

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "Say it."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def document(codec: TextCodec) -> dict[str, Any]:
    service = service_around(ScriptedEngine(codec), codec, Metrics(MODEL, "ingress-1"))
    found: dict[str, Any] = Client(httpx.ASGITransport(create_app(service))).get("/openapi.json").json()
    return found


def is_described(document: dict[str, Any], path: str, body: dict[str, Any]) -> bool:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    return bool(validator.is_valid(body))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "Once"}),
        (COMPLETIONS, {"prompt": [5, 6]}),
        (COMPLETIONS, {"prompt": ["Once", "Twice"], "stop": None, "stop_token_ids": None, "logit_bias": None}),
        (COMPLETIONS, {"prompt": [[5], [6, 7]], "stop": "a", "logit_bias": {"7": -1}, "early_stopping": None}),
        (COMPLETIONS, {"prompt": "Once", "stop": ["a", "b"], "user": "u", "metadata": {"a": "b"}, "suffix": None}),
        (COMPLETIONS, {"prompt": "Once", "use_beam_search": True, "early_stopping": "never"}),
        (COMPLETIONS, {"prompt": "Once", "stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, {"messages": [USER], "store": False, "response_format": {"type": "text"}, "tools": None}),
        (CHAT, {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, USER]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None}]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}]}),
        (CHAT, {"messages": [USER | {"name": "Ann", "id": 7}, {"role": "assistant", "content": None, "name": None},
                             {"role": "function", "name": "f", "content": None}]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [
            {"index": 0, "function": {"name": "a b", "arguments": {"a": 1}}},
            {"id": None, "type": None, "function": {"name": "f", "arguments": "{"}}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]},
                             {"role": "tool", "content": "a", "tool_call_id": "c"}], "tools": [TOOL]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "tools": [TOOL],
                "tool_choice": "none"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}),
        (CHAT, {"messages": [USER], "tools": [{"type": "web_search"}, {"type": "custom", "custom": {"name": "f"}}],
                "tool_choice": {"type": "custom", "custom": {"name": "f"}}}),
        (CHAT, {"messages": [USER], "functions": [{"name": "f"}], "function_call": {"name": "f"}}),
        (RESPONSES, {"input": [USER, {"type": "web_search_call"}], "tools": [
            {"type": "web_search"}, {"type": "custom", "name": "f", "format": {"type": "text"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 5,
                    "tools": [{"type": "bash_20250124", "name": "bash"}]}),
        (MESSAGES, {"messages": [USER], "max_tokens": 5, "metadata": {"user_id": "u"}, "system": None}),
        (MESSAGES, {"messages": [USER], "max_tokens": 5, "system": [{"type": "text", "text": "a", "x": 1}],
                    "tools": [{"name": "f", "input_schema": {}, "cache_control": None}],
                    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
                    "thinking": {"type": "enabled", "budget_tokens": 1024}, "service_tier": "auto"}),
        (MESSAGES, {"messages": [USER, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "a", "signature": "s"}, {"type": "redacted_thinking", "data": "d"},
            {"type": "text", "text": "a"}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}]},
                {"type": "tool_result", "tool_use_id": "t", "is_error": True}]}], "max_tokens": 5}),
        (f"{MESSAGES}/count_tokens", {"messages": [USER]}),
        (RESPONSES, {"input": "a", "store": False, "tools": None, "include": None, "user": "u", "text": None}),
        (RESPONSES, {"input": [USER, {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "a", "annotations": []}]}, USER], "reasoning": {"summary": "auto"}}),
        (RESPONSES, {"input": [USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                               {"type": "function_call_output", "call_id": "c", "output": "a"}],
                     "tools": [{"type": "function", "name": "f"}], "tool_choice": "auto"}),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}),
        ("/tokenize", {"messages": [USER]}),
        ("/tokenize", {"prompt": "Once"}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
)  # fmt: skip
def test_accepted_requests_match_the_document(
    client: Client, document: dict[str, Any], path: str, fields: dict[str, Any]
) -> None:
    body = {"model": "demo", **fields}
    response = client.post(path, body)
    assert response.status_code == 200, response.text
    assert is_described(document, path, body)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": 5}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": ["a", 5]}),
        (COMPLETIONS, {"prompt": "Once", "suffix": "a"}),
        (COMPLETIONS, {"prompt": "Once", "stop": [5]}),
        (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [USER], "functions": [{"name": "f", "parameters": 5}]}),
        (RESPONSES, {"input": 5}),
        (RESPONSES, {"input": "a", "tools": [{"type": "custom"}]}),
        (RESPONSES, {"input": "a", "tools": [{"type": "namespace", "name": "n"}]}),
        (RESPONSES, {"input": "a", "reasoning": {"effort": "huge"}}),
        (RESPONSES, {"input": "a", "conversation": 7}),
        (CHAT, {"messages": [USER], "structured_outputs": {"choice": []}}),
        (MESSAGES, {"messages": [USER]}),
        (MESSAGES, {"messages": [{"role": "wizard", "content": "a"}], "max_tokens": 5}),
        (MESSAGES, {"messages": [USER], "max_tokens": 5, "tools": [{"name": "f"}]}),
        (MESSAGES, {"messages": [USER], "max_tokens": 5, "container": "c"}),
    ],
)
def test_requests_refused_for_their_form_do_not_match_the_document(
    client: Client, document: dict[str, Any], path: str, fields: dict[str, Any]
) -> None:
    body = {"model": "demo", **fields}
    assert client.post(path, body).status_code == 400
    assert not is_described(document, path, body)
