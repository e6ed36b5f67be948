"""Constraints under other servers' names, on words and tokens, and what schemas leave open."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, create_app
from deployments.api.fields.closed_objects import closed
from engine.grammar.compiler import compile_grammar
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import Vocabulary
from tests.deployments.support.scripted_api import Client, ScriptedEngine

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "hi", "max_tokens": 9}
BOTH = pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
EOS = 2


@pytest.fixture
def client(service: ApiService) -> Client:
    """A client of a model whose end is known."""
    served = service.models["demo"]
    card = replace(served.card, eos_token_ids=frozenset({EOS}))
    return Client(httpx.ASGITransport(create_app(replace(service, models={"demo": replace(served, card=card)}))))


def asked(client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any]) -> Grammar:
    response = client.post(path, body)
    assert response.status_code == 200, response.text
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    return grammar


def may_follow(engine: ScriptedEngine, grammar: Grammar, text: str) -> set[int] | None:
    """Return which tokens may follow a text; None if it cannot be written."""
    tokenizer: Any = engine.codec.tokenizer
    ids = engine.codec.encode(text, add_special_tokens=False)
    matcher = compile_grammar(grammar, Vocabulary.of(tokenizer, 4096, [EOS]).load())
    if matcher.try_consume_tokens(ids) < len(ids):
        return None
    mask = matcher.compute_bitmask()
    return {token for token in range(4096) if mask[token // 8] >> (token % 8) & 1}


@BOTH
@pytest.mark.parametrize(
    ("other", "own"),
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"json_schema": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_regex": "[ab]+"}, {"regex": "[ab]+"}),
        ({"regex": "[ab]+"}, {"regex": "[ab]+"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"guided_grammar": 'start: "a"', "guided_decoding_backend": "xgrammar"}, {"grammar": 'start: "a"'}),
    ],
)
def test_other_servers_names_ask_for_the_same(
    client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any], other: Any, own: Any
) -> None:
    assert asked(client, engine, path, body | other) == asked(
        client, engine, path, body | {"structured_outputs": own}
    )


@BOTH
@pytest.mark.parametrize("field", ["ebnf", "guided_grammar"])
def test_grammars_may_be_written_in_gbnf(
    client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any], field: str
) -> None:
    grammar = asked(client, engine, path, body | {field: 'root ::= "yes " number\nnumber ::= [0-9]+'})
    assert may_follow(engine, grammar, "yes 12") is not None and may_follow(engine, grammar, "no") is None


@BOTH
def test_only_one_constraint_can_be_asked_for(client: Client, path: str, body: dict[str, Any]) -> None:
    both = client.post(path, body | {"guided_regex": "a", "structured_outputs": {"regex": "a"}})
    assert "cannot be combined" in both.json()["error"]["message"]
    for restriction in ({"bad_words": ["a"]}, {"allowed_token_ids": [5]}):
        error = client.post(path, body | {"regex": "a"} | restriction).json()["error"]
        assert error["param"] == next(iter(restriction))
    assert client.post(path, body | {"guided_choice": []}).json()["error"]["param"] == "guided_choice"


# --- words and tokens -------------------------------------------------------------------------------------------


@BOTH
def test_bad_words_are_not_written_however_they_are_tokenized(
    client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    grammar = asked(client, engine, path, body | {"bad_words": ["fox", " a/b*"]})
    free = may_follow(engine, grammar, "The quick brown f")
    assert free is not None and EOS in free
    assert not any("ox" in engine.codec.decode([token])[:2] for token in free)
    for text in ("The quick brown fox", "fo" + "x", "say a/b* now"):
        assert may_follow(engine, grammar, text) is None
    assert may_follow(engine, grammar, "The box a/b<|im_start|>") is not None
    assert client.post(path, body | {"bad_words": [" "]}).json()["error"]["param"] == "bad_words"
    assert client.post(path, body | {"bad_words": []}).status_code == 200
    assert engine.requests[-1].sampling.grammar is None


@BOTH
def test_only_allowed_tokens_are_written(
    client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    ids = [300, 301, 302, 400, 0]
    grammar = asked(client, engine, path, body | {"allowed_token_ids": [*ids, EOS]})
    assert may_follow(engine, grammar, "") == {*ids, EOS}
    assert engine.requests[-1].sampling.min_tokens == 0
    asked(client, engine, path, body | {"allowed_token_ids": ids})
    assert engine.requests[-1].sampling.min_tokens == 9  # without an end among them, only max_tokens ends it
    wrongs: list[dict[str, Any]] = [{"allowed_token_ids": []}, {"allowed_token_ids": [4096]}]
    for wrong in (*wrongs, {"allowed_token_ids": ids, "stop": "a"}):
        assert client.post(path, body | wrong).json()["error"]["param"] == "allowed_token_ids"


@BOTH
def test_llama_cpps_name_of_the_repetition_penalty(
    client: Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    client.post(path, body | {"repeat_penalty": 1.25})
    assert engine.requests[-1].sampling.repetition_penalty == 1.25
    differ = body | {"repeat_penalty": 1.25, "repetition_penalty": 1.5}
    assert client.post(path, differ).json()["error"]["param"] == "repeat_penalty"


# --- what schemas leave open ------------------------------------------------------------------------------------


@BOTH
def test_objects_have_the_properties_that_their_schema_names(
    client: Client, engine: ScriptedEngine, service: ApiService, path: str, body: dict[str, Any]
) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    assert may_follow(engine, asked(client, engine, path, body | form), '{"a":1,') is None
    limits = service.limits.model_copy(update={"closed_objects": False})
    standard = Client(httpx.ASGITransport(create_app(replace(service, limits=limits))))
    assert may_follow(engine, asked(standard, engine, path, body | form), '{"a":1,') is not None


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (SCHEMA, {**SCHEMA, "additionalProperties": False}),
        ({**SCHEMA, "additionalProperties": True}, None),
        ({**SCHEMA, "additionalProperties": {"type": "string"}}, None),
        ({"type": "object"}, None),
        ({"allOf": [SCHEMA, {"properties": {"b": True}}]}, None),
        ({**SCHEMA, "anyOf": [{"required": ["a"]}]}, None),
        ({"type": "object", "properties": {"properties": {"type": "string"}}},
         {"type": "object", "properties": {"properties": {"type": "string"}}, "additionalProperties": False}),
        ({"type": "array", "items": SCHEMA, "$defs": {"x": SCHEMA}},
         {"type": "array", "items": {**SCHEMA, "additionalProperties": False},
          "$defs": {"x": {**SCHEMA, "additionalProperties": False}}}),
        ({"const": SCHEMA}, None),
    ],
)  # fmt: skip
def test_only_plain_objects_with_properties_are_closed(
    schema: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    assert closed(schema) == (schema if expected is None else expected)
