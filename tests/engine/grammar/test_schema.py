"""Schemas that llguidance gets wrong by itself: names that run out, values without an end, and annotations."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from engine.base.errors import InvalidGrammar
from engine.grammar.schema import rewritten
from engine.grammar.spec import Grammar
from engine.grammar.texts import FORMATS
from tests.engine.support.grammar_walks import accepts, walk

NULL, INTEGER = {"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}


def allows(schema: Any, text: str) -> bool:
    """Whether an answer may be this text, as it may if it validates."""
    return accepts(Grammar("json_schema", json.dumps(schema)), text)


# --- names ---------------------------------------------------------------------------------------------------

B_OR_C = {**CLOSED, "patternProperties": {"^(b|c)$": INTEGER}}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({**CLOSED, "patternProperties": {"^b$": INTEGER}}, ["{}", '{"b":1}'], ['{"b":1,"b":1}', '{"a":1}']),
        ({**CLOSED, "required": ["a"], "patternProperties": {"^a$": INTEGER}},
         ['{"a":1}'], ["{}", '{"a":1,"a":1}']),
        (B_OR_C, ['{"b":1,"c":2}', '{"c":2}'], ['{"b":1,"c":2,"b":1}', '{"c":1,"c":1}']),
        ({**B_OR_C, "required": ["c"]}, ['{"b":1,"c":2}', '{"c":2}'], ['{"b":1}']),
        ({**CLOSED, "patternProperties": {"^[ab]$": INTEGER, "^a$": {"maximum": 3}}},
         ['{"a":3,"b":9}'], ['{"a":4}', '{"a":3,"a":3}']),
        ({**CLOSED, "properties": {"a": INTEGER}, "patternProperties": {"^a$": {"maximum": 3}}},
         ['{"a":3}'], ['{"a":4}', '{"a":3,"a":3}']),
        ({**CLOSED, "patternProperties": {"^a$": INTEGER, "^a": {"type": ["integer", "null"]}}},
         ['{"a":3,"ab":null}'], ['{"a":null}', '{"a":1,"a":1}']),
        ({**CLOSED, "patternProperties": {"^[\"\\n\u00e9]$": NULL}},
         ['{"\u00e9":null}', '{"\\"":null}'], ['{"a":null}']),
        ({**CLOSED, "patternProperties": {"^b$": INTEGER}, "maxProperties": 3}, ['{"b":1}'], ['{"b":1,"b":1}']),
        ({**CLOSED, "patternProperties": {"^b$": INTEGER}, "minProperties": 1}, ['{"b":1}'], ["{}"]),
        ({**CLOSED, "patternProperties": {"^b$": False}}, ["{}"], ['{"b":1}']),
        ({**CLOSED, "patternProperties": {r"[^\s\S]": NULL, "^b$": INTEGER}, "maxProperties": 1},
         ["{}", '{"b":1}'], ['{"b":1,"b":1}']),
        ({"type": "object", "patternProperties": {"^b$": False}}, ["{}", '{"c":1}'], ['{"b":1}']),
        ({"items": B_OR_C, "type": "array"}, ['[{"b":1}]'], ['[{"b":1,"b":1}]']),
        ({"$defs": {"x": B_OR_C}, "$ref": "#/$defs/x"}, ['{"b":1}'], ['{"b":1,"b":1}']),
        ({"anyOf": [B_OR_C, NULL]}, ['{"b":1}', "null"], ['{"b":1,"b":1}']),
        ({"allOf": [B_OR_C, {"required": ["c"]}]}, ['{"c":1}'], ["{}", '{"c":1,"c":1}']),
        ({**CLOSED, "properties": {"patternProperties": {"type": "object", "patternProperties": {"^b$": NULL},
          "additionalProperties": False}}}, ['{"patternProperties":{"b":null}}'],
         ['{"patternProperties":{"b":null,"b":null}}']),
        ({"type": "object", "properties": {"a": NULL}, "additionalProperties": INTEGER},
         ['{"a":null,"b":1}'], ['{"\\u0061":1}', '{"a":null,"\\u0061":1}']),
    ],
)  # fmt: skip
def test_names_that_can_be_counted_are_neither_repeated_nor_missing(
    schema: dict[str, Any], allowed: list[str], forbidden: list[str]
) -> None:
    for text in allowed:
        assert allows(schema, text), text
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert not [text for text in forbidden if allows(schema, text)]


def test_a_pattern_of_too_many_names_stays_a_pattern() -> None:
    for pattern in ("^[a-z]{2}$", "^b", "b", "", "(", f"^{'a' * 5000}$", "^(a|b)*$"):
        schema = {"patternProperties": {pattern: NULL}}
        assert rewritten(schema)["patternProperties"] == schema["patternProperties"]
    large = {"anyOf": [{"const": number} for number in range(2000)]}
    assert rewritten({"patternProperties": {"^[ab]$": large}})["properties"].keys() == {"a", "b"}
    assert "^[a-d]$" in rewritten({"patternProperties": {"^[a-d]$": large}})["patternProperties"]


def test_a_pattern_that_a_reference_names_stays_where_it_is() -> None:
    schema = {
        **CLOSED,
        "patternProperties": {"^b$": NULL},
        "properties": {"c": {"$ref": "#/patternProperties/%5Eb%24"}},
    }
    assert allows(schema, '{"c":null,"b":null}') and not allows(schema, '{"c":1}')


# --- values without an end -------------------------------------------------------------------------------------

ENDLESS = {"type": "object", "properties": {"y": {"$ref": "#/$defs/x"}}, "required": ["y"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [NULL, {"$ref": "#"}], "minItems": 2},
        {"$ref": "#/$defs/x", "$defs": {"x": ENDLESS}},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/x"}], "$defs": {"x": ENDLESS}},
        {"allOf": [{"$ref": "#/$defs/x"}, {}], "$defs": {"x": ENDLESS}},
        {"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"enum": []}, False]}, "minItems": 1},
        {"type": "object", "patternProperties": {"^[ab]$": {"$ref": "#"}}, "required": ["b"]},
        {**CLOSED, "properties": {"a": False, "b": {"$ref": "#"}}, "minProperties": 1},
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"$ref": "#/$defs/a~1b%20c"}}},
    ],
)
def test_a_schema_that_only_endless_values_match_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidGrammar, match="without end"):
        allows(schema, "")


@pytest.mark.parametrize(
    "leaf",
    [
        {"type": "string", "minLength": 5, "maxLength": 3},
        {"type": "string", "pattern": "[^\\s\\S]"},
        {"type": "string", "pattern": "^ab$", "maxLength": 1},
        {"type": "string", "format": "date", "maxLength": 3},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "string", "enum": [1, 2]},
        {"type": "string", "const": 5},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"$ref": "#/$defs/contradiction"},
    ],
)
@pytest.mark.parametrize(
    "endless",
    [
        {"type": "array", "items": {"$ref": "#/$defs/tree"}, "minItems": 1},
        {"type": "object", "properties": {"k": {"$ref": "#/$defs/tree"}}, "required": ["k"]},
        {"type": "object", "properties": {"k": {"anyOf": [False, {"$ref": "#/$defs/tree"}]}}, "required": ["k"]},
    ],
)
def test_an_alternative_that_contradicts_itself_is_no_end(leaf: Any, endless: Any) -> None:
    none = {"type": "number", "minimum": 2, "maximum": 1}
    kinds = {"tree": {"anyOf": [leaf, endless]}, "contradiction": none}
    with pytest.raises(InvalidGrammar, match='"#/\\$defs/tree"'):
        allows({"$ref": "#/$defs/tree", "$defs": kinds}, "")
    maybe = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}
    assert allows({**maybe, "$defs": kinds}, "{}") and not allows({**maybe, "$defs": kinds}, '{"l')


def test_another_schema_can_be_chosen_instead_of_a_recursive_one_that_nothing_matches() -> None:
    link = {"type": "object", "properties": {"v": {"type": "number", "minimum": 4, "maximum": 2}}}
    link = {**link, "required": ["v"], "additionalProperties": {"$ref": "#/$defs/link"}}
    schema = {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}], "$defs": {"link": link}}
    assert allows(schema, "null") and not allows(schema, "{")


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
         ["{}", '{"a":{"a":{}}}'], []),
        ({"anyOf": [{"$ref": "#/$defs/x"}, NULL], "$defs": {"x": ENDLESS}}, ["null"], ["{"]),
        ({**CLOSED, "properties": {"a": {"$ref": "#/$defs/x"}, "b": NULL}, "$defs": {"x": ENDLESS}},
         ["{}", '{"b":null}'], ['{"a']),
        ({"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": ENDLESS}}, ["[]"], ["[{"]),
        ({"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1},
         ["null", "[null]", "[[null]]"], ["[]"]),
    ],
)  # fmt: skip
def test_where_an_endless_value_may_be_left_out_it_cannot_be_begun(
    schema: dict[str, Any], allowed: list[str], forbidden: list[str]
) -> None:
    assert all(allows(schema, text) for text in allowed)
    assert not [text for text in forbidden if allows(schema, text)]
    assert walk(Grammar("json_schema", json.dumps(schema)), (), 60)[0] == "complete"


@pytest.mark.parametrize("name", ["default", "const", "enum", "examples", "$ref", "$id", "required", "properties"])
def test_a_property_may_be_named_as_a_keyword(name: str) -> None:
    schema = {
        **CLOSED,
        "properties": {name: {"$ref": "#/$defs/x"}, "y": {"$ref": "#/$defs/y"}},
        "required": [name],
        "$defs": {"x": {**B_OR_C, "properties": {name: {"type": "string", "format": "path"}}}, "y": ENDLESS},
    }
    assert allows(schema, f'{{"{name}":{{"{name}":"any","b":1}}}}')
    assert not allows(schema, f'{{"{name}":{{"b":1,"b":1}}}}')


def test_references_that_have_another_meaning_are_left_to_llguidance() -> None:
    inner = {"$id": "http://host/inner", "$defs": {"x": NULL}, "$ref": "#/$defs/x"}
    assert allows({"type": "array", "items": inner, "minItems": 1, "$defs": {"x": ENDLESS}}, "[null]")


# --- annotations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["password", "path", "binary", "byte", "int64", "color", "", "Date", "regex", "iri"]
)
def test_an_unknown_format_constrains_nothing(name: str) -> None:
    for schema in ({"type": "string", "format": name}, {"format": name}, {"items": {"format": name}}):
        assert allows(schema, '"any text"') or allows(schema, "[1]")
    lark = Grammar("lark", f'start: "x" %json {{"type":"string","format":"{name}"}}')
    assert accepts(lark, 'x"any text"')


def test_the_formats_that_are_enforced_are_those_of_llguidance() -> None:
    others = {
        "idn-email",
        "idn-hostname",
        "uri-reference",
        "iri",
        "uri-template",
        "json-pointer",
        "regex",
        "password",
    }
    for name in FORMATS.keys() | others:
        grammar = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
        assert ("Unknown format" in LLMatcher.validate_grammar(grammar)) is (name not in FORMATS)
    assert not allows({"type": "string", "format": "date"}, '"any text"')


@pytest.mark.parametrize(
    "keywords",
    [
        {"title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True, "$comment": "c"},
        {"readOnly": True, "writeOnly": True, "contentMediaType": "a/b", "contentEncoding": "base64"},
        {"contentSchema": {"type": "null"}, "x-order": 1, "example": 1, "nullable": True, "xml": {}},
        {"uniqueItems": False, "propertyNames": {}, "unevaluatedProperties": True, "unevaluatedItems": {}},
        {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}, "minContains": 1, "maxContains": 2},
        {"if": {"type": "null"}}, {"then": False}, {"else": False}, {"then": False, "else": False},
    ],
)  # fmt: skip
def test_keywords_that_constrain_nothing_are_accepted(keywords: dict[str, Any]) -> None:
    schema = {"type": "string", **keywords}
    assert allows(schema, '"a"')
    jsonschema.Draft202012Validator(schema).validate("a")


@pytest.mark.parametrize(
    "name", ["uniqueItems", "if", "contains", "not", "propertyNames", "unevaluatedProperties"]
)
def test_keywords_that_cannot_be_enforced_are_refused_by_name(name: str) -> None:
    keywords = {name: True if name == "uniqueItems" else {"type": "null"}, "then": False, "minContains": 1}
    with pytest.raises(InvalidGrammar, match=rf"{name}.*not supported"):
        allows({"properties": {name: keywords}}, "")
    assert allows({"properties": {name: NULL}}, f'{{"{name}":null}}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "integer", "minimum": 1, "maximum": 2, "multipleOf": 5},
        {"type": "array", "minItems": 3, "maxItems": 1},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "string", "enum": [1, 2]},
        {"type": "string", "const": 1},
        {"enum": []},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {**CLOSED, "required": ["a"]},
        {**CLOSED, "required": ["b"], "patternProperties": {"^a$": {}}},
        {"type": "string", "pattern": "[^\\s\\S]"},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "integer", "minimum": 1e400},
    ],
)
def test_a_contradiction_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        allows(schema, "")
    assert len(str(caught.value)) < 400
