"""Bad input to the real application: its own clear error, and the service serves on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e

NUMERIC = (
    "max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens",
)  # fmt: skip


@pytest.fixture
def http(any_url: str) -> Iterator[httpx.Client]:
    """After every test a good request must still be answered."""
    with httpx.Client(base_url=any_url, timeout=120) as client:
        yield client
        response = client.post("/v1/completions", json=text(client))
        assert response.status_code == 200 and response.json()["choices"][0]["finish_reason"]


def model(http: httpx.Client) -> dict[str, Any]:
    card: dict[str, Any] = http.get("/v1/models").json()["data"][0]
    return card


def text(http: httpx.Client, **change: Any) -> dict[str, Any]:
    return {"model": model(http)["id"], "prompt": "Return the", "max_tokens": 4, **change}


def chat(http: httpx.Client, **change: Any) -> dict[str, Any]:
    return {"model": model(http)["id"], "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **change}


def refused(response: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert param is None or error["param"] == param
    return error


@pytest.mark.parametrize("prompt", ["", [], [[]], [""]])
def test_an_empty_prompt(http: httpx.Client, prompt: Any) -> None:
    refused(http.post("/v1/completions", json=text(http, prompt=prompt)), param="prompt")


def test_no_messages(http: httpx.Client) -> None:
    refused(http.post("/v1/chat/completions", json=chat(http, messages=[])), param="messages")


def test_a_prompt_longer_than_the_context(http: httpx.Client) -> None:
    length = model(http)["max_model_len"]
    for prompt in ([5] * (length + 1), "word " * (2 * length), "x" * 4_000_000):
        error = refused(http.post("/v1/completions", json=text(http, prompt=prompt)), param="prompt")
        assert error["code"] == "context_length_exceeded"
    error = refused(http.post("/v1/completions", json=text(http, max_tokens=length)))
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("name", NUMERIC)
def test_bad_numbers(http: httpx.Client, name: str) -> None:
    for path, base in (("/v1/completions", text(http)), ("/v1/chat/completions", chat(http))):
        base.pop(name, None)
        for value in ("-3", "NaN", "Infinity", "1e400", "9" * 40, '"1"', "true", "[1]", "{}"):
            body = json.dumps(base)[:-1] + f', "{name}": {value}}}'
            refused(http.post(path, content=body))


def test_wrong_types(http: httpx.Client) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {"stop": 5},
        {"stream": "yes"},
        {"prompt": {"a": 1}},
        {"model": 5},
        {"logit_bias": [1]},
    )
    for change in changes:
        refused(http.post("/v1/completions", json=text(http, **change)), param=next(iter(change)))


def test_an_unknown_model(http: httpx.Client) -> None:
    for path, base in (("/v1/completions", text(http)), ("/v1/chat/completions", chat(http))):
        refused(http.post(path, json=base | {"model": "gpt-9"}), 404, "model")


def test_an_unknown_role(http: httpx.Client) -> None:
    messages = [{"role": "wizard", "content": "hi"}]
    refused(http.post("/v1/chat/completions", json=chat(http, messages=messages)), param="messages.0.role")


def test_unknown_fields_are_named_and_unsupported_ones_refused(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json=chat(http, tempreature=1))
    assert response.status_code == 200 and response.headers["x-raydix-ignored-fields"] == "tempreature"
    changes: tuple[dict[str, Any], ...] = (
        {"chat_template": "{{ messages }}"},
        {"modalities": ["text", "audio"]},
        {"logits_processors": ["x"]},
    )
    for change in changes:
        refused(http.post("/v1/chat/completions", json=chat(http, **change)), param=next(iter(change)))


def test_choices_beams_grammars_and_tools_that_cannot_be(http: httpx.Client) -> None:
    """Each error names its field, and the service goes on."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        deep = {"type": "array", "items": deep}
    wide = {"enum": ["x" * 1000 + str(number) for number in range(70)]}
    nameless = {"type": "function", "function": {"parameters": {"type": "object"}}}
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("n", {"n": 129}),
        ("best_of", {"n": 2, "best_of": 1}),
        ("best_of", {"best_of": 99}),
        ("stream", {"use_beam_search": True, "best_of": 2, "stream": True}),
        ("structured_outputs", {"structured_outputs": {"json": deep}}),
        ("structured_outputs", {"structured_outputs": {"json": wide}}),
        ("structured_outputs", {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}),
        ("structured_outputs", {"structured_outputs": {"regex": "("}}),
        ("tools", {"tools": [nameless]}),
    )
    for param, change in changes:
        error = refused(http.post("/v1/chat/completions", json=chat(http, **change)))
        assert error["param"].partition(".")[0] == param, (change, error)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 50_000], ids=lambda body: repr(body[:8]))
def test_invalid_json(http: httpx.Client, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        refused(http.post(path, content=body))


def test_a_body_of_ten_megabytes(http: httpx.Client) -> None:
    refused(http.post("/v1/completions", json=text(http, prompt="x" * 10_000_000)), 413)


def test_ten_thousand_stop_strings(http: httpx.Client) -> None:
    stop = [str(i) for i in range(10_000)]
    refused(http.post("/v1/completions", json=text(http, stop=stop)), param="stop")


@pytest.mark.parametrize("token", [-1, 10**7, 2**40, 10**30])
def test_token_ids_out_of_the_vocabulary(http: httpx.Client, token: int) -> None:
    refused(http.post("/v1/completions", json=text(http, prompt=[5, token])), param="prompt")


@pytest.mark.parametrize("escape", ["\\ud800", "\\udc00", "a\\ud83dz"])
def test_lone_surrogates(http: httpx.Client, escape: str) -> None:
    for path, base in (("/v1/completions", text(http, prompt="@")), ("/v1/completions", text(http, stop="@"))):
        refused(http.post(path, content=json.dumps(base).replace("@", escape)))
    messages = [{"role": "user", "content": "@"}]
    body = json.dumps(chat(http, messages=messages)).replace("@", escape)
    refused(http.post("/v1/chat/completions", content=body))
