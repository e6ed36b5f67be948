"""Whatever is generated and asked for: log-probabilities next to a text are of the tokens that spell it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.api import ApiService, Limits, ModelCard, ServedModel, create_app
from monitoring.metrics import Metrics
from tests.deployments.api.dialects.conftest import ASK, TOOLS, codec_of
from tests.deployments.support.api_over_engines import no_metrics
from tests.deployments.support.chat_templates import HERMES
from tests.deployments.support.scripted_api import MODEL, STOP, Client, ScriptedEngine
from tests.support.examples import examples

CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "utc"}}</tool_call>'
PARTS = (
    "The", " fox", "E", "EN", "END", "x", " ", "\n\n", "😀", "漢", "é", "<think>", "</think>", " so ", CALL,
    "<tool_call>", "</tool_call>", '{"name": "clock"', "<|im_start|>",
)  # fmt: skip
PLAIN = {"model": MODEL, "prompt": "a", "logprobs": 1}
CHAT = {**ASK, "logprobs": True, "top_logprobs": 1}
RESPONSE = {"model": MODEL, "input": "Hi", "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
BROKEN = range(97, 259)
"""Tokens of single bytes beyond ASCII."""


class Model:
    """A model that generates what the test says, so many tokens a step."""

    def __init__(self, *added: str) -> None:
        self.codec = codec_of(HERMES, added, frozenset())
        self.engine = ScriptedEngine(self.codec)
        metrics, card = (
            Metrics(MODEL, "ingress-1"),
            ModelCard(MODEL, created=1, max_model_len=4096, vocab_size=4200),
        )
        served = ServedModel(card, self.engine, self.codec, metrics)
        service = ApiService({MODEL: served}, no_metrics, Limits(), metrics)
        self.client = Client(httpx.ASGITransport(create_app(service)))

    def says(self, ids: list[int], chunk: int) -> None:
        self.engine.codec = cast(Any, SimpleNamespace(encode=lambda *_, **__: ids))
        self.engine.chunk = chunk

    def whole(self, path: str, body: dict[str, Any]) -> Any:
        response = self.client.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        lines = self.client.post(path, body | {"stream": True}).text.splitlines()
        for line in lines:
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


MODELS = [Model(), Model("<think>", "</think>", "<tool_call>", "</tool_call>")]


def spelled(tokens: list[dict[str, Any]]) -> str:
    return b"".join(bytes(token["bytes"]) for token in tokens).decode(errors="replace")


outputs = st.lists(
    st.one_of(
        st.sampled_from(PARTS).map(lambda text: MODELS[0].codec.encode(text, add_special_tokens=False)),
        st.sampled_from(BROKEN).map(lambda token: [token]),
        st.integers(0, 4096).map(lambda token: [token]),
    ),
    max_size=12,
).map(lambda parts: [token for part in parts for token in part if token != STOP])
stops = st.one_of(
    st.none(), st.lists(st.sampled_from(["END", "x", "fox E", "\n\n", "\ufffd"]), min_size=1, max_size=2)
)
asked = given(
    model=st.sampled_from(MODELS),
    ids=outputs,
    chunk=st.integers(1, 40),
    options=st.fixed_dictionaries(
        {"stop": stops},
        optional={
            "max_tokens": st.integers(10, 30),
            "skip_special_tokens": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
            "min_tokens": st.integers(0, 9),
            "stop_token_ids": st.lists(st.integers(90, 300), max_size=3),
        },
    ),
)
tried = settings(deadline=None, max_examples=examples(60))


@tried
@asked
def test_a_chat_s_chunks_have_the_tokens_of_their_text(
    model: Model, ids: list[int], chunk: int, options: dict[str, Any]
) -> None:
    model.says(ids, chunk)
    body = {**CHAT, "tools": TOOLS, **options}
    whole = model.whole("/v1/chat/completions", body)["choices"][0]
    text, thoughts, num_calls = "", "", 0
    tokens: list[dict[str, Any]] = []
    for chunk_ in model.events("/v1/chat/completions", body):
        (choice,) = chunk_["choices"]
        content = choice["delta"].get("content") or ""
        logprobs = choice["logprobs"]["content"] if choice["logprobs"] else []
        assert not content or not logprobs or spelled(logprobs) == content
        text, tokens, thoughts = text + content, tokens + logprobs, thoughts + choice["delta"].get("reasoning", "")
        num_calls += sum("id" in call for call in choice["delta"].get("tool_calls", ()))
    assert text == (whole["message"]["content"] or "") and tokens == whole["logprobs"]["content"]
    assert thoughts == whole["message"].get("reasoning", "")
    assert num_calls == len(whole["message"].get("tool_calls", ()))


@tried
@asked
def test_a_completion_s_chunks_have_the_tokens_of_their_text_and_where_they_begin(
    model: Model, ids: list[int], chunk: int, options: dict[str, Any]
) -> None:
    model.says(ids, chunk)
    body = {**PLAIN, "echo": chunk % 2 == 0, "max_tokens": 200, "return_token_ids": True, **options}
    whole = model.whole("/v1/completions", body)["choices"][0]
    text, names, offsets, seen = "", list[str](), list[int](), list[int]()
    for event in model.events("/v1/completions", body):
        (choice,) = event["choices"]
        logprobs = choice["logprobs"] or {"tokens": [], "text_offset": []}
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        own = choice.get("token_ids", [])
        if choice["text"] and own:
            bytes_ = b"".join(bytes(model.codec.token_text(token)[1]) for token in own)
            assert bytes_.decode(errors="replace") == choice["text"]
            assert logprobs["text_offset"][0] == len(text)
        elif own:
            assert logprobs["text_offset"] == [len(text)] * len(own)
        text, names = text + choice["text"], names + logprobs["tokens"]
        offsets, seen = offsets + logprobs["text_offset"], seen + own
    assert text == whole["text"] and seen == whole["token_ids"]
    assert names == whole["logprobs"]["tokens"] and offsets == whole["logprobs"]["text_offset"]


@tried
@asked
def test_a_response_s_deltas_have_the_tokens_of_their_text(
    model: Model, ids: list[int], chunk: int, options: dict[str, Any]
) -> None:
    """And its parts have those of their deltas: neither the end nor reasoning nor calls are among them."""
    model.says(ids, chunk)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {**RESPONSE, "tools": tools, "max_output_tokens": options.get("max_tokens", 200)}
    parts: dict[str, list[dict[str, Any]]] = {}
    events = list(model.events("/v1/responses", body))
    for event in events:
        if event["type"] == "response.output_text.delta":
            assert not event["logprobs"] or spelled(event["logprobs"]) == event["delta"]
            parts.setdefault(event["item_id"], []).extend(event["logprobs"])
        elif event["type"] == "response.output_text.done":
            assert event["logprobs"] == parts.get(event["item_id"], [])
    (ended,) = [event["response"] for event in events if "response" in event][-1:]
    said = [item["content"][0] for item in ended["output"] if item["type"] == "message"]
    assert [part["logprobs"] for part in said] == [
        parts.get(item["id"], []) for item in ended["output"] if item["type"] == "message"
    ]
    again = model.whole("/v1/responses", body)["output"]
    assert [i["content"][0] for i in again if i["type"] == "message"] == said


@pytest.mark.parametrize("chunk", [1, 2, 3, 50])
def test_the_end_token_has_a_chunk_of_its_own(chunk: int) -> None:
    """Even when it comes in one step with the last word, as with speculation."""
    model = MODELS[0]
    model.says(model.codec.encode("The fox.", add_special_tokens=False), chunk)
    chunks = [event["choices"][0] for event in model.events("/v1/chat/completions", CHAT)]
    shown = [
        (c["delta"].get("content"), [t["token"] for t in c["logprobs"]["content"]])
        for c in chunks
        if c["logprobs"]
    ]
    assert "".join("".join(tokens) for content, tokens in shown if content) == "The fox."
    assert shown[-1] == ("", ["<|im_end|>"])
    ended = list(model.events("/v1/responses", RESPONSE))[-1]["response"]["output"][0]["content"][0]
    assert "".join(at["token"] for at in ended["logprobs"]) == ended["text"] == "The fox."
    whole = model.whole("/v1/chat/completions", CHAT)["choices"][0]
    assert [at["token"] for at in whole["logprobs"]["content"]][-1] == "<|im_end|>"  # with all that was generated


def test_a_token_that_a_stop_string_cuts_has_its_text_without_the_stop_string() -> None:
    model = MODELS[0]
    (token,) = {i for i in range(300, 4096) if model.codec.token_text(i)[0] == " return"} or {0}
    model.says([*model.codec.encode("a", add_special_tokens=False), token], 50)
    chunks = [event["choices"][0] for event in model.events("/v1/chat/completions", {**CHAT, "stop": "turn"})]
    shown = [
        (chunk["delta"].get("content"), [t["token"] for t in (chunk["logprobs"] or {"content": []})["content"]])
        for chunk in chunks
    ]
    assert shown[1:-1] == [("a", ["a"]), (" re", []), ("", [" return"])]
