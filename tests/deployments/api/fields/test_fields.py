"""Fields that this server does not know, those that only label or advise, and other names of what it does."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, create_app
from tests.deployments.support.scripted_api import Client, ScriptedEngine

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "hi"}
BOTH = pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
IGNORED = "x-raydix-ignored-fields"


def events(client: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in client.post(path, body).text.split("\n\n")]
    return [json.loads(event) for event in data if event.startswith("{")]


def client_of(service: ApiService, rule: str) -> Client:
    limits = service.limits.model_copy(update={"unknown_fields": rule})
    return Client(httpx.ASGITransport(create_app(replace(service, limits=limits))))


@BOTH
def test_unknown_fields_are_ignored_and_named(client: Client, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, body | {"temprature": 0, "nvext": {"a": 1}, "provider": None})
    assert response.status_code == 200
    assert response.headers[IGNORED] == "temprature, nvext"
    assert IGNORED not in client.post(path, body | {"provider": None}).headers


def test_an_error_names_them_too_and_no_name_breaks_the_header(client: Client) -> None:
    response = client.post("/tokenize", {"prompt": "hi", "a\r\nset-cookie: b": 1, "ü" * 300: 1})
    assert response.headers[IGNORED] == "a??set-cookie??b, " + "?" * 64
    many = {f"f{number}": 1 for number in range(1000)}
    response = client.post("/v1/completions", COMPLETION | {"temperature": -1} | many)
    assert response.status_code == 400
    assert response.headers[IGNORED].split(", ") == [f"f{number}" for number in range(16)]


@BOTH
def test_a_setting_decides_what_happens_to_unknown_fields(
    service: ApiService, path: str, body: dict[str, Any]
) -> None:
    asked = body | {"temprature": 0}
    response = client_of(service, "refuse").post(path, asked)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "temprature")
    assert "limits.unknown_fields" in error["message"] and "Did you mean temperature?" in error["message"]
    assert client_of(service, "refuse").post(path, body | {"temprature": None}).status_code == 200
    response = client_of(service, "ignore").post(path, asked)
    assert response.status_code == 200 and IGNORED not in response.headers


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "prediction": {"type": "content", "content": "a"}, "request_id": "r", "rid": "r"},
        {"cache_prompt": True, "user": "u", "metadata": {"a": "b"}, "top_k": -1, "service_tier": "auto"},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
def test_fields_that_only_label_or_advise_are_accepted(
    client: Client, path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    response = client.post(path, body | fields)
    assert response.status_code == 200 and IGNORED not in response.headers


@BOTH
def test_known_fields_that_would_change_the_answer_stay_an_error(
    client: Client, path: str, body: dict[str, Any]
) -> None:
    response = client.post(path, body | {"logits_processors": ["a"]})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_field")


@BOTH
def test_the_newer_name_of_max_tokens_holds_everywhere(client: Client, path: str, body: dict[str, Any]) -> None:
    usage = client.post(path, body | {"max_completion_tokens": 3}).json()["usage"]
    assert usage["completion_tokens"] == 3
    assert client.post(path, body | {"max_completion_tokens": 3, "max_tokens": 4}).status_code == 400


@BOTH
def test_service_tiers_are_priorities(
    client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    for fields in ({"service_tier": "flex"}, {"service_tier": "priority"}, {"service_tier": "default"}, {}):
        client.post(path, body | fields)
    client.post(path, body | {"service_tier": "flex", "priority": 5})
    assert [request.priority for request in engine.requests] == [1, -1, 0, 0, 5]


@BOTH
def test_all_tokens_are_candidates_with_a_top_k_of_minus_1(
    client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    assert client.post(path, body | {"top_k": -1}).status_code == 200
    assert engine.requests[0].sampling.top_k == 0
    assert client.post(path, body | {"top_k": -2}).json()["error"]["param"] == "top_k"


def test_a_schema_may_be_left_out(client: Client, engine: ScriptedEngine) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "anything"}}
    assert client.post("/v1/chat/completions", CHAT | {"response_format": form}).status_code == 200
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None and grammar.kind == "json_object"


@BOTH
@pytest.mark.parametrize("field", ["prompt", "max_tokens"])
def test_an_error_about_the_context_length_has_the_words_that_clients_look_for(
    client: Client, path: str, body: dict[str, Any], field: str
) -> None:
    """LiteLLM and LangChain shorten the conversation when they find them."""
    long = "word " * 2000
    change: dict[str, Any] = {"max_tokens": 10_000}
    if field == "prompt":
        change = {"prompt": long} if "prompt" in body else {"messages": [{"role": "user", "content": long}]}
    error = client.post(path, body | change).json()["error"]
    assert error["message"].startswith("This model's maximum context length is 512 tokens")
    assert error["code"] == "context_length_exceeded"


@BOTH
def test_each_chunk_has_the_usage_so_far_if_asked(
    client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    """GuideLLM counts tokens by it."""
    engine.says = "Grüße, 世界 🌍!"  # some tokens have no text of their own
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = body | {"max_tokens": 100}
    chunks = events(client, path, body | {"stream": True, "stream_options": options})
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == len(engine.codec.encode(engine.says)) + 1
    assert {usage["prompt_tokens"] for usage in usages} == {usages[-1]["prompt_tokens"]}
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    plain = events(client, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert [chunk["usage"] for chunk in plain[:-1]] == [None] * (len(plain) - 1)


NOTED = {
    "type": "object",
    "title": "t",
    "properties": {
        "format": {"type": "string", "format": "password", "x-order": 1, "default": {"x": 1}},
        "list": {"type": "array", "items": {"type": "integer", "nullable": True}, "uniqueItems": False},
        "when": {"type": "string", "format": "date", "examples": [{"y": 1}], "contentMediaType": "text/plain"},
    },
    "$comment": "none",
}
UNKNOWN = (
    "properties.format.format",
    "properties.format.x-order",
    "properties.list.items.nullable",
    "properties.when.contentMediaType",
)


@BOTH
def test_schema_keywords_that_constrain_nothing_are_named_as_unknown_fields_are(
    service: ApiService, path: str, body: dict[str, Any]
) -> None:
    fields: dict[str, dict[str, Any]] = {
        "response_format.json_schema.schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NOTED}}
        },
        "structured_outputs.json": {"structured_outputs": {"json": json.dumps(NOTED)}},
        "guided_json": {"guided_json": NOTED},
    }
    for place, field in fields.items():
        response = client_of(service, "warn").post(path, body | field)
        assert response.status_code == 200
        named = response.headers[IGNORED].split(", ")
        assert sorted(named) == sorted(f"{place}.{name}"[:64] for name in UNKNOWN)
        assert IGNORED not in client_of(service, "ignore").post(path, body | field).headers
        refused = client_of(service, "refuse").post(path, body | field)
        assert refused.status_code == 400 and place in refused.json()["error"]["param"]


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": NOTED}}},
            "text.format.schema",
        ),
        (
            "/v1/messages",
            {**CHAT, "max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": NOTED}}},
            "output_config.format.schema",
        ),
    ],
)
def test_so_it_is_in_the_schemas_of_other_apis(
    client: Client, path: str, body: dict[str, Any], place: str
) -> None:
    response = client.post(path, {"model": "demo"} | body)
    assert response.status_code == 200, response.text
    named = response.headers[IGNORED].split(", ")
    assert sorted(named) == sorted(f"{place}.{name}"[:64] for name in UNKNOWN)


PHONE = {"type": "object", "properties": {"a": {"type": "string", "format": "phone"}}}
OF_CHAT = {"type": "function", "function": {"name": "f", "parameters": PHONE}}
STRICT = {"type": "function", "function": {"name": "g", "parameters": PHONE, "strict": True}}
FLAT = {"type": "function", "name": "f", "parameters": PHONE}
OF_MESSAGES = {"name": "f", "input_schema": PHONE}
JSON_ANSWER = {"type": "json_object"}
CHATS = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "change", "places"),
    [
        (CHATS, {"tools": [OF_CHAT]}, []),
        (CHATS, {"tools": [OF_CHAT], "tool_choice": "none"}, []),
        (CHATS, {"tools": [OF_CHAT], "tool_choice": "required"}, ["tools.0.function.parameters"]),
        (CHATS, {"tools": [OF_CHAT], "response_format": JSON_ANSWER}, ["tools.0.function.parameters"]),
        (CHATS, {"tools": [OF_CHAT, STRICT]},
         ["tools.0.function.parameters", "tools.1.function.parameters"]),
        (CHATS,
         {"tools": [OF_CHAT, STRICT], "tool_choice": {"type": "function", "function": {"name": "f"}}},
         ["tools.0.function.parameters"]),
        (CHATS, {"functions": [{"name": "f", "parameters": PHONE}], "function_call": {"name": "f"}},
         ["functions.0.parameters"]),
        ("/v1/responses", {"tools": [FLAT]}, []),
        ("/v1/responses", {"tools": [{"type": "namespace", "name": "n", "tools": [{**FLAT, "strict": True}]}]},
         ["tools.0.tools.0.parameters"]),
        ("/v1/responses", {"tools": [FLAT], "tool_choice": {"type": "function", "name": "f"}},
         ["tools.0.parameters"]),
        ("/v1/messages", {"tools": [OF_MESSAGES], "tool_choice": {"type": "auto"}}, []),
        ("/v1/messages", {"tools": [OF_MESSAGES], "tool_choice": {"type": "any"}}, ["tools.0.input_schema"]),
        ("/v1/messages", {"tools": [{**OF_MESSAGES, "strict": True}]}, ["tools.0.input_schema"]),
    ],
)  # fmt: skip
def test_so_it_is_in_the_schemas_of_functions_to_which_calls_are_held(
    service: ApiService, path: str, change: dict[str, Any], places: list[str]
) -> None:
    asked = {"model": "demo", "input": "hi"} if path == "/v1/responses" else CHAT
    body = {**asked, **({"max_tokens": 5} if path == "/v1/messages" else {}), **change}
    response = client_of(service, "warn").post(path, body)
    assert response.status_code == 200, response.text
    named = response.headers.get(IGNORED, "")
    assert named == ", ".join(f"{place}.properties.a.format" for place in places)
    refused = client_of(service, "refuse").post(path, body)
    assert refused.status_code == (400 if places else 200), refused.text
