"""Every bad input has its own 400-class error that names the field, and never reaches an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deployments.support.scripted_api import Client, ScriptedEngine

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "demo", "prompt": "hi"}
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTS = ("max_tokens", "n", "top_k", "min_tokens", "seed", "priority")
WRONG_TYPES = ('"1"', "true", "[]", "{}", "[1]")


def bad_numbers() -> Iterator[tuple[str, str]]:
    for name in FLOATS:
        for value in ("-3", "NaN", "Infinity", "-Infinity", "1e400", "1e300", "9" * 400, *WRONG_TYPES):
            yield name, value
    for name in INTS:
        for value in ("1.5", "NaN", "Infinity", "1e400", "1e300", str(10**30), "9" * 5000, *WRONG_TYPES):
            yield name, value
        if name not in ("seed", "priority", "top_k"):
            yield name, "-1"
    yield from (("priority", "-1000"), ("top_k", "-2"))


@pytest.mark.parametrize("path, base", [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_numbers_out_of_range_and_of_the_wrong_type(
    client: Client, engine: ScriptedEngine, path: str, base: dict[str, Any]
) -> None:
    for name, value in bad_numbers():
        body = json.dumps(base)[:-1] + f', "{name}": {value}}}'
        response = client.post(path, body.encode())
        error = response.json()["error"]
        assert response.status_code == 400, (name, value, response.text)
        assert error["type"] == "invalid_request_error" and len(error["message"]) < 500
        assert error["param"] == name or value in ("NaN", "Infinity", "-Infinity")
    assert engine.requests == []


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "tool", "content": "hi", "tool_call_id": 1}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"image_url": {"url": "x"}}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "hi", "name": 1}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "hi"}] * 5000}, "messages"),
    ({"max_tokens": 10_000}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"prompt_logprobs": 6}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"echo": True}, "echo"),
    ({"n": 129}, "n"),
    ({"stop": [str(i) for i in range(10_000)]}, "stop"),
    ({"stop": ["x" * 300]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [4096]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(100))}, "stop_token_ids"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"logit_bias": {"4096": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"cache_salt": "x" * 1000}, "cache_salt"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"chat_template": "{{ evil }}"}, "chat_template"),
    ({"continue_final_message": 1}, "continue_final_message"),
    ({"skip_special_tokens": 1}, "skip_special_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("change, param", BAD_CHAT, ids=lambda value: str(value)[:40])
def test_bad_chats(client: Client, engine: ScriptedEngine, change: dict[str, Any], param: str) -> None:
    response = client.post("/v1/chat/completions", CHAT | change)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert engine.requests == []


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [5] * 512}, "prompt"),
    ({"prompt": "hi", "max_tokens": 512}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 17}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": -3}, "best_of"),
    ({"best_of": 2.5}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 3, "n": 2, "stream": True}, "stream"),
    ({"logprobs": 5, "echo": True, "n": 8, "prompt": [[5] * 66] * 64, "max_tokens": 0}, "logprobs"),
    ({"prompt_logprobs": 5, "n": 8, "prompt": [[5] * 66] * 64}, "prompt_logprobs"),
    ({"prompt_logprobs": 6}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1.5}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": "1"}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "max_tokens": -1}, "max_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
]


@pytest.mark.parametrize("change, param", BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_bad_completions(client: Client, engine: ScriptedEngine, change: dict[str, Any], param: str) -> None:
    response = client.post("/v1/completions", TEXT | change)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert engine.requests == []


def test_a_prompt_that_does_not_fit_has_openais_code(client: Client) -> None:
    for change in ({"prompt": [5] * 600}, {"max_tokens": 512}):
        error = client.post("/v1/completions", TEXT | change).json()["error"]
        assert error["code"] == "context_length_exceeded" and "512" in error["message"]


@pytest.mark.parametrize(
    "body, says",
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'{"model": "demo", "prompt": "hi"} x', "not valid JSON"),
        (b"\xff\xfe{}", "UTF-8"),
        (b'{"model": "demo", "prompt": "\\ud800"}', "surrogate"),
        (b'{"model": "demo", "prompt": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"model": "demo", "prompt": "a", "metadata": ' + b"[" * 70 + b"]" * 70 + b"}", "nested"),
        (b"[" * 30_000, "nested"),
        (b"[" * 100_000, "values"),
        (b'{"model": "demo", "prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"model": "demo", "prompt": "a", "temperature": 1e999}', "too large"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bodies_that_are_no_proper_json(client: Client, body: bytes, says: str) -> None:
    response = client.post("/v1/completions", body)
    assert response.status_code == 400 and says in response.json()["error"]["message"]


def test_nesting_within_the_limit_is_fine(client: Client) -> None:
    body = b'{"model": "demo", "prompt": "a", "metadata": ' + b"[" * 63 + b"]" * 63 + b"}"
    assert client.post("/v1/completions", body).status_code == 200


def test_a_body_that_is_too_large_is_refused_announced_or_not(client: Client) -> None:
    body = json.dumps(TEXT | {"prompt": "x" * 10_000_000}).encode()
    assert client.post("/v1/completions", body).status_code == 413

    async def unannounced() -> Any:
        for start in range(0, len(body), 2**20):
            yield body[start : start + 2**20]

    response = client.request("POST", "/v1/completions", content=unannounced())
    assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("path, body", [("/v1/completions", TEXT), ("/tokenize", {"prompt": "hi"})])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({}, 200),
        (
            {"origin": "https://evil.example.com"},
            415,
        ),  # a page's Blob without a type, which browsers let pass unasked
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data; boundary=application/json"}, 415),
        ({"content-type": "text/plain;application/json"}, 415),
    ],
)
def test_only_bodies_declared_as_json_are_read(
    client: Client, path: str, body: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    response = client.post(path, json.dumps(body).encode(), headers=headers)
    assert response.status_code == status
    if status != 200:
        assert "-H 'content-type: application/json'" in response.json()["error"]["message"]


def test_an_unknown_compression_is_refused(client: Client) -> None:
    packed = client.post("/v1/completions", b"x", headers={"content-encoding": "br"})
    assert packed.status_code == 415


@pytest.mark.parametrize("path, base", [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_an_unknown_model_is_a_404(client: Client, path: str, base: dict[str, Any]) -> None:
    response = client.post(path, base | {"model": "gpt-9"})
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": 1}]
)
def test_bad_tokenize_requests(client: Client, body: dict[str, Any]) -> None:
    assert client.post("/tokenize", body).status_code == 400


@pytest.mark.parametrize("tokens", [[4096], [-1], ["a"], [True], None, 5, [1] * 600])
def test_bad_detokenize_requests(client: Client, tokens: Any) -> None:
    assert client.post("/detokenize", {"tokens": tokens}).status_code == 400
