"""Structural tags: free text in which triggers begin tags, whose content is held to its schema."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.deployments.support.scripted_api import MODEL, Client, ScriptedEngine
from tests.engine.support.grammar_models import compiler, tokenizer

SEARCH = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
STRUCTURES: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=search>", "schema": SEARCH, "end": "</function>"},
        {"begin": "<function=count>", "schema": {"type": "integer"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def tags(**options: bool) -> dict[str, Any]:
    """The same tags in XGrammar's form."""
    listed = [
        {
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": one["end"],
        }
        for one in STRUCTURES["structures"]
    ]
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": STRUCTURES["triggers"], "tags": listed, **options},
    }


def ask(client: Client, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, **fields}
    return client.post("/v1/chat/completions", body)


def taken(client: Client, engine: ScriptedEngine, *texts: str, **fields: Any) -> list[bool]:
    """Return which of the texts may be the answer."""
    answer = ask(client, **fields)
    assert answer.status_code == 200, answer.text
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    found = []
    for text in texts:
        matcher, ids = compiler().compile(grammar).matcher.deep_copy(), tokenizer().encode(text)
        found.append(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    return found


ONE = '<function=search>{"text": "a < b"}</function>'
TWO = f"Well: {ONE} and <function=count>7</function>."
WRONG = '<function=search>{"text": 7}</function>'
UNKNOWN = "<function=other>{}</function>"


@pytest.mark.parametrize("form", [STRUCTURES, tags()])
def test_text_is_free_and_tags_match_their_schemas(
    client: Client, engine: ScriptedEngine, form: dict[str, Any]
) -> None:
    texts = [
        "",
        "Hello.",
        ONE,
        TWO,
        WRONG,
        f"So {WRONG}",
        UNKNOWN,
        "a <function",
        '<function=count>"7"</function>',
    ]
    expected = [True, True, True, True, False, False, False, True, False]
    assert taken(client, engine, *texts, response_format=form) == expected
    for given in (form, json.dumps(form)):
        assert taken(client, engine, *texts, structured_outputs={"structural_tag": given}) == expected


def test_a_tag_can_be_required_and_be_the_last(client: Client, engine: ScriptedEngine) -> None:
    texts = ["Hello.", ONE, f"{ONE} x", f"x {ONE}"]
    assert taken(client, engine, *texts, response_format=tags(at_least_one=True)) == [False, True, True, False]
    assert taken(client, engine, *texts, response_format=tags(stop_after_first=True)) == [True, True, False, True]
    both = tags(at_least_one=True, stop_after_first=True)
    assert taken(client, engine, *texts, response_format=both) == [False, True, False, False]


def test_marks_that_are_special_tokens_are_meant(client: Client, engine: ScriptedEngine) -> None:
    tag = {
        "begin": "<|im_start|>{",
        "content": {"type": "json_schema", "json_schema": {"type": "null"}},
        "end": "}",
    }
    form = {"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": [tag]}
    ask(client, response_format={"type": "structural_tag", "format": form})
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    special = tokenizer().encode("<|im_start|>")
    assert len(special) == 1 and f"<[{special[0]}]>" in grammar.source
    for content, is_right in (("{null}", True), ("{1}", False)):
        matcher, ids = compiler().compile(grammar).matcher.deep_copy(), [*special, *tokenizer().encode(content)]
        assert (matcher.try_consume_tokens(ids) == len(ids)) == is_right


def changed(**fields: Any) -> dict[str, Any]:
    return {**STRUCTURES, **fields}


@pytest.mark.parametrize(
    ("form", "param", "complaint"),
    [
        ({"type": "structural_tag"}, "response_format", "needs structures and triggers, or a format"),
        (changed(triggers=None), "response_format", "needs structures and triggers, or a format"),
        (changed(triggers=[]), "response_format", "at least one text"),
        (changed(triggers=[""]), "response_format", "none may be empty"),
        (changed(structures=[]), "response_format", "at least one tag"),
        (changed(triggers=["<call>"]), "response_format.structures.0.begin", "must begin with one of triggers"),
        (changed(type="text"), "response_format.structures", "only allowed when type is structural_tag"),
        ({"type": "structural_tag", "format": {"type": "regex"}}, "response_format.format.type", "triggered_tags"),
        (changed(structures=[{"begin": "<function=a>", "schema": [], "end": ""}]),
         "response_format.structures.0.schema", "must be a JSON schema"),
        (changed(structures=STRUCTURES["structures"] * 2000), "response_format", "at most"),
    ],
)  # fmt: skip
def test_bad_tags_are_a_400_that_names_the_field(
    client: Client, engine: ScriptedEngine, form: dict[str, Any], param: str, complaint: str
) -> None:
    answer = ask(client, response_format=form)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert complaint in error["message"] and not engine.requests
