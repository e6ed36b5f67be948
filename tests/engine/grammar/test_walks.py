"""Small schemas and grammars, contradictory ones too: each is refused, or what it lets begin has an end.

A search of 20,000 schemas (`@seed(12)`) and one of 10,000 grammars (`--hypothesis-seed=4`) met no dead end and no
invalid answer. The examples that stand here were found by searches before.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from engine.base.errors import InvalidGrammar
from engine.grammar.spec import Grammar
from tests.engine.support.grammar_walks import walk
from tests.support.examples import examples

NAMES = st.sampled_from(["a", "b", "ab", ""])
PATTERNS = st.sampled_from(
    ["^a$", "^(a|b)$", "^[ab]$", "^a", "^[a-c]*b$", "^a?$", "[^\\s\\S]", "^[a-z]{2}$", "^ab?c$"]
)
SMALL = st.integers(0, 3)
REFERENCES = st.sampled_from(["#", "#/$defs/x", "#/$defs/y"])


def optional(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return optional(
        properties=st.dictionaries(NAMES, inner, max_size=2),
        patternProperties=st.dictionaries(PATTERNS, inner, max_size=2),
        additionalProperties=st.one_of(st.just(False), inner),
        required=st.lists(NAMES, max_size=2, unique=True),
        minProperties=st.integers(0, 2),
        maxProperties=SMALL,
    ).map(lambda found: {"type": "object", **found})


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return optional(
        items=inner, prefixItems=st.lists(inner, min_size=1, max_size=2), minItems=SMALL, maxItems=SMALL
    ).map(lambda found: {"type": "array", **found})


LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.booleans(),
    st.sampled_from([{"type": "null"}, {"type": "boolean"}]),
    st.sampled_from([{"enum": ["a", 1, None]}, {"enum": []}, {"const": "ab"}]),
    REFERENCES.map(lambda reference: {"$ref": reference}),
    optional(minimum=SMALL, maximum=SMALL, multipleOf=st.integers(1, 3)).map(
        lambda found: {"type": "integer", **found}
    ),
    optional(
        minLength=SMALL,
        maxLength=SMALL,
        pattern=PATTERNS,
        format=st.sampled_from(["password", "date", "x"]),
    ).map(lambda found: {"type": "string", **found}),
)  # fmt: skip
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
        st.tuples(objects(inner), inner).map(lambda both: {**both[0], "anyOf": [both[1]]}),
    ),
    max_leaves=6,
)
ROOTS = st.tuples(objects(SCHEMAS) | arrays(SCHEMAS) | SCHEMAS, SCHEMAS, SCHEMAS).map(
    lambda found: {**(found[0] if isinstance(found[0], dict) else {}), "$defs": {"x": found[1], "y": found[2]}}
)
CHOICES = st.lists(st.integers(0, 4095), max_size=12)


UNCOUNTED = {
    "type": "object",
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
    "patternProperties": {"[^\\s\\S]": {"type": "null"}, "^[a-z]{2}$": {"type": "object", "required": ["a"]}},
}


@settings(max_examples=examples(100))
@given(ROOTS, CHOICES)
@example(
    {"type": "object", "required": ["a"], "patternProperties": {"^a$": {}}, "additionalProperties": False}, []
)
@example({**UNCOUNTED, "$defs": {}}, [2])
@example({"type": "object", "patternProperties": {"^[ab]$": {"$ref": "#"}}, "maxProperties": 2}, [0, 1])
def test_an_answer_to_a_schema_that_is_accepted_ends_and_is_valid(
    schema: dict[str, Any], choices: list[int]
) -> None:
    try:
        end, text = walk(Grammar("json_schema", json.dumps(schema)), choices, 200)
    except InvalidGrammar:
        assume(False)
    if end == "long" and "$ref" in json.dumps(schema):
        return  # where the walk may choose between an end and a reference, it may choose the reference each time
    assert end == "complete", (end, text, json.dumps(schema))
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except RecursionError:  # the library follows "anyOf": [{"$ref": "#"}, ...] without end
        assume(False)


RULES = ("start", "one", "two", "three")
TERMINALS = {"WORD": "/[a-c]{1,3}/", "VOID": r"/[^\s\S]/", "NONE": "/a/ & /b/", "MAYBE": "/d?/"}
PARTS = st.tuples(
    st.sampled_from(
        [*RULES, *TERMINALS, '"a"', '"b"', '""', "/[xy]/", "/[a-b&&c]/", '("a" | two)', '[three "z"]']
    ),
    st.sampled_from(["", "", "", "?", "*", "+", "{2,3}", "{0,2}"]),
).map("".join)
BODIES = st.lists(st.lists(PARTS, max_size=3).map(" ".join), min_size=1, max_size=3).map(" | ".join)


@settings(max_examples=examples(100))
@given(st.tuples(*[BODIES] * len(RULES)), CHOICES)
def test_a_grammar_that_is_accepted_leads_to_no_dead_end(bodies: tuple[str, ...], choices: list[int]) -> None:
    lines = [f"{name}: {body}" for name, body in zip(RULES, bodies, strict=True)]
    lines += [f"{name}: {body}" for name, body in TERMINALS.items()]
    try:
        end, text = walk(Grammar("lark", "\n".join(lines)), choices, 40)
    except InvalidGrammar:
        assume(False)
    assert end in ("complete", "long"), (end, text)
