"""Each keyword of a JSON schema is held, refused or named in every format of calls: none is dropped in silence.

A call is strict or forced. Of each keyword there is a value that only this keyword forbids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from deployments.api.dialects.formats import FORMATS
from deployments.api.dialects.segments import ParserDriver
from engine.base.errors import InvalidGrammar
from engine.grammar.texts import FORMATS as TEXTS
from tests.deployments.api.dialects.conftest import ASK, Talk, takes, tool
from tests.deployments.support.chat_templates import CODER, FAMILIES, GEMMA, HERMES, PYTHONIC

Make = Callable[..., Talk]
IGNORED = "x-raydix-ignored-fields"
TEMPLATES = {
    "hermes": HERMES, "gemma4": GEMMA, "qwen3_coder": CODER, "glm": FAMILIES["glm"],
    "minimax": FAMILIES["minimax"], "pythonic": PYTHONIC,
}  # fmt: skip
JSON, GEMMA4, KEYED = ("hermes",), ("gemma4",), ("qwen3_coder", "glm", "minimax")
ALL = tuple(TEMPLATES)
OWN = GEMMA4
"""Formats with a syntax of their own for lists and objects; the others have JSON there."""
TEXT, NUMBER, LIST, MAP = ({"type": kind} for kind in ("string", "number", "array", "object"))
FREE = {"type": ["string", "null"]}
EXAMPLES = {
    "date": ("2024-02-29", "2024-13-01"), "date-time": ("2024-02-29T10:00:00Z", "2024-02-29 10:00"),
    "duration": ("P1DT2H", "1 day"), "email": ("a.b@example.org", "a.b at example.org"),
    "hostname": ("a.example.org", "-a-"), "ipv4": ("10.0.0.255", "10.0.0.256"),
    "ipv6": ("2001:db8::1", "2001:db8:1"), "time": ("10:00:00+02:00", "25:00:00Z"),
    "uri": ("https://example.org/a?b#c", "example.org a"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
}  # fmt: skip
COLOR = {
    "$defs": {"color": {"type": "string", "enum": ["red", "blue"]}, "day": {"type": "string", "format": "date"}}
}
CASES: Mapping[str, tuple[dict[str, Any], Any, Any, tuple[str, ...]]] = {
    **{f"format {name}": ({**TEXT, "format": name}, *EXAMPLES[name], ()) for name in sorted(TEXTS)},
    "format, or null": ({**FREE, "format": "date"}, None, "today", ()),
    "format with a length": ({**TEXT, "format": "email", "maxLength": 8}, "a@b.org", "abc@d.org", ()),
    "format of an alternative": ({"anyOf": [{**TEXT, "format": "date"}, {"type": "null"}]}, "2024-02-29", "x", ()),
    "format beside alternatives": (
        {**TEXT, "anyOf": [{"format": "date"}, {"format": "uuid"}]}, "2024-02-29", "today", ()),
    "format of a reference": ({"$ref": "#/$defs/day"}, "2024-02-29", "today", ()),
    "format in a list": ({**LIST, "items": {**TEXT, "format": "date"}}, ["2024-02-29"], ["today"], ()),
    "format beside a list of values": ({**TEXT, "enum": ["2024-02-29", "x"], "format": "date"}, "2024-02-29", "x",
                                       GEMMA4 + KEYED),
    "minLength": ({**TEXT, "minLength": 2}, "ab", "a", ()),
    "minLength, or null": ({**FREE, "minLength": 9}, None, "short", ()),
    "maxLength": ({**TEXT, "maxLength": 2}, "ab", "abc", ()),
    "pattern": ({**TEXT, "pattern": "^[a-c]+$"}, "abc", "abd", ()),
    "pattern with a length": ({**TEXT, "pattern": "b", "maxLength": 2}, "ab", "abc", ()),
    "pattern that is anchored within": ({**TEXT, "pattern": "(^a|^b)c$"}, "ac", "xac", GEMMA4 + KEYED),
    "minimum": ({**NUMBER, "minimum": 2}, 2, 1, ()),
    "maximum": ({**NUMBER, "maximum": 2}, 2, 3, ()),
    "exclusiveMinimum": ({**NUMBER, "exclusiveMinimum": 2}, 3, 2, ()),
    "exclusiveMaximum": ({**NUMBER, "exclusiveMaximum": 2}, 1, 2, ()),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, 10, 9, ()),
    "type integer": ({"type": "integer"}, 1, 1.5, ()),
    "minItems": ({**LIST, "minItems": 1}, [1], [], ()),
    "maxItems": ({**LIST, "maxItems": 1}, [1], [1, 2], ()),
    "items": ({**LIST, "items": NUMBER}, [1], ["a"], ()),
    "items as a list": ({**LIST, "items": [NUMBER]}, [1], ["a"], OWN),
    "additionalItems": ({**LIST, "items": [NUMBER], "additionalItems": False}, [1], [1, 2], OWN),
    "prefixItems": ({**LIST, "prefixItems": [NUMBER]}, [1], ["a"], OWN),
    "uniqueItems": ({**LIST, "uniqueItems": True}, [1], [1, 1], ALL),
    "contains": ({**LIST, "contains": NUMBER}, [1], ["a"], ALL),
    "maxContains": ({**LIST, "contains": NUMBER, "maxContains": 1}, [1], [1, 1], ALL),
    "unevaluatedItems": ({**LIST, "prefixItems": [NUMBER], "unevaluatedItems": False}, [1], [1, 2], ALL),
    "properties": ({**MAP, "properties": {"b": NUMBER}, "required": ["b"]}, {"b": 1}, {"b": "x"}, ()),
    "required": ({**MAP, "properties": {"b": NUMBER}, "required": ["b"]}, {"b": 1}, {}, ()),
    "required without a schema": (
        {**MAP, "required": ["b"], "additionalProperties": NUMBER}, {"b": 1}, {"b": "x"}, ()),
    "additionalProperties": ({**MAP, "additionalProperties": NUMBER}, {"b": 1}, {"b": "x"}, ()),
    "additionalProperties false": (
        {**MAP, "properties": {"b": NUMBER}, "additionalProperties": False}, {"b": 1}, {"c": 1}, ()),
    "a property that is false": ({**MAP, "properties": {"b": False, "c": True}}, {"c": 1}, {"b": 1}, ()),
    "patternProperties": ({**MAP, "patternProperties": {"^b": NUMBER}}, {"b": 1}, {"b": "x"}, OWN),
    "propertyNames": ({**MAP, "propertyNames": {"maxLength": 1}}, {"b": 1}, {"bb": 1}, ALL),
    "minProperties": ({**MAP, "minProperties": 1}, {"b": 1}, {}, OWN),
    "maxProperties": ({**MAP, "maxProperties": 1}, {"b": 1}, {"b": 1, "c": 2}, OWN),
    "dependentRequired": ({**MAP, "dependentRequired": {"b": ["c"]}}, {"c": 1}, {"b": 1}, ALL),
    "dependentSchemas": ({**MAP, "dependentSchemas": {"b": {"required": ["c"]}}}, {"c": 1}, {"b": 1}, ALL),
    "dependencies": ({**MAP, "dependencies": {"b": ["c"]}}, {"c": 1}, {"b": 1}, ALL),
    "unevaluatedProperties": ({**MAP, "unevaluatedProperties": False}, {}, {"b": 1}, ALL),
    "enum": ({"enum": ["a", 1]}, "a", "b", ()),
    "enum of texts": ({**TEXT, "enum": ["a", "b"]}, "a", "c", ()),
    "enum with a type": ({**TEXT, "enum": ["a", 1]}, "a", 1, ()),
    "enum of whole numbers": ({"type": "integer", "enum": [1, 1.5]}, 1, 1.5, ()),
    "enum, or null": ({"anyOf": [{**TEXT, "enum": ["a", "b"]}, {"type": "null"}]}, None, "c", ()),
    "enum of a reference": ({"$ref": "#/$defs/color"}, "red", "green", ()),
    "enum with a length": ({**TEXT, "enum": ["a", "bb"], "minLength": 2}, "bb", "a", GEMMA4 + KEYED),
    "enum with a bound": ({"type": "integer", "enum": [1, 2], "minimum": 2}, 2, 1, GEMMA4),
    "const": ({"const": "a"}, "a", "b", ()),
    "const in an enum": ({**TEXT, "enum": ["a", "b"], "const": "a"}, "a", "b", ()),
    "$ref with more": ({"$ref": "#/$defs/day", "maxLength": 3}, "2024-02-29", "2024-02-28", ALL),
    "$ref with an enum": ({"$ref": "#/$defs/color", "enum": ["red"]}, "red", "blue", GEMMA4 + KEYED),
    "$dynamicRef": ({"$dynamicRef": "#/$defs/color"}, "red", "green", ALL),
    "$ref to the whole": ({**LIST, "items": {"$ref": "#"}}, [], [[]], GEMMA4 + KEYED + ("pythonic",)),
    "allOf": ({"allOf": [{**TEXT, "enum": ["a", "b"]}]}, "a", "c", OWN),
    "allOf with a type": ({**TEXT, "allOf": [{"enum": ["a", "b"]}]}, "a", "c", GEMMA4 + KEYED),
    "anyOf": ({"anyOf": [TEXT, NUMBER]}, "a", None, ()),
    "anyOf with a type": ({**TEXT, "anyOf": [{"maxLength": 1}, NUMBER]}, "a", 1, GEMMA4 + KEYED),
    "anyOf with members": (
        {**MAP, "anyOf": [{"required": ["b"]}], "properties": {"b": NUMBER}}, {"b": 1}, {}, OWN),
    "oneOf": ({"oneOf": [{**TEXT, "enum": ["a", "b"]}, NUMBER]}, "a", "c", ()),
    "oneOf that overlap": ({"oneOf": [TEXT, {**TEXT, "maxLength": 1}]}, "ab", "a", ALL),
    "not": ({**TEXT, "not": {"const": "a"}}, "b", "a", ALL),
    "if": ({**TEXT, "if": {"minLength": 1}, "then": {"const": "a"}}, "a", "b", ALL),
    "format unknown": ({**TEXT, "format": "phone"}, None, None, ("named", "format")),
    "contentEncoding": ({**TEXT, "contentEncoding": "base64"}, None, None, ("named", "contentEncoding")),
    "contentMediaType": ({**TEXT, "contentMediaType": "image/png"}, None, None, ("named", "contentMediaType")),
    "contentSchema": ({**TEXT, "contentSchema": {"type": "null"}}, None, None, ("named", "contentSchema")),
    "a keyword that nobody knows": ({**NUMBER, "minimun": 3}, None, None, ("named", "minimun")),
}  # fmt: skip
"""A schema, a value that it allows, one that only the keyword forbids, and the formats in which it is refused."""
OF_ARGUMENTS: Mapping[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "properties": ({"properties": {"a": NUMBER}, "required": ["a"]}, {"a": 1}, {"a": "x"}, ()),
    "required": ({"properties": {"a": NUMBER}, "required": ["a"]}, {"a": 1}, {}, ()),
    "required without a schema": ({"required": ["a"], "additionalProperties": NUMBER}, {"a": 1}, {"a": "x"}, ()),
    "required and forbidden": ({"required": ["a"], "additionalProperties": False}, {}, {"a": 1}, ALL),
    "additionalProperties": ({"additionalProperties": NUMBER}, {"a": 1}, {"a": "x"}, ()),
    "a property that is false": ({"properties": {"a": False}, "additionalProperties": True}, {}, {"a": 1}, ()),
    **{
        name: (asked, right, wrong, tuple(form for form in ALL if form not in held))
        for name, (asked, right, wrong, held) in dict[str, tuple[Any, Any, Any, tuple[str, ...]]]({
            "patternProperties": ({"patternProperties": {"^a": NUMBER}}, {"a": 1}, {"a": "x"}, JSON),
            "propertyNames": ({"propertyNames": {"maxLength": 1}}, {"a": 1}, {"aa": 1}, ()),
            "minProperties": ({"minProperties": 1}, {"a": 1}, {}, JSON),
            "maxProperties": ({"maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}, JSON),
            "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, {"b": 1}, {"a": 1}, ()),
            "unevaluatedProperties": ({"unevaluatedProperties": False}, {}, {"a": 1}, ()),
            "enum": ({"enum": [{"a": 1}]}, {"a": 1}, {"a": 2}, JSON),
            "const": ({"const": {"a": 1}}, {"a": 1}, {"a": 2}, JSON),
            "anyOf": ({"anyOf": [{"required": ["a"]}]}, {"a": 1}, {}, JSON),
            "not": ({"not": {"required": ["a"]}}, {}, {"a": 1}, ()),
        }).items()
    },
}  # fmt: skip


def spellings(form: str, parameters: dict[str, Any], arguments: dict[str, Any]) -> list[str]:
    """Return how a call may be written so that these arguments are read. A text may have JSON's quotes."""
    as_json = {key: json.dumps(value, separators=(",", ":")) for key, value in arguments.items()}
    said = [FORMATS[form].spell_all([("f", json.dumps(each))]) for each in (arguments, as_json)]
    if form == "pythonic":
        said.append(said[0].replace("None", "null"))
    return [one for one in said if read(form, parameters, one) == arguments]


def read(form: str, parameters: dict[str, Any], said: str) -> Any:
    """Return the arguments of the call that is read in an answer."""
    driver = ParserDriver(FORMATS[form].parser({"f": parameters}))
    found = [*driver.push(said), *driver.finish()]
    return json.loads("".join(segment.text for segment in found if segment.kind == "arguments"))


def outcome(it: Talk, form: str, parameters: dict[str, Any], right: Any, wrong: Any) -> str:
    """Ask for a call of a function with these parameters; return what became of the schema."""
    function = {"name": "f", "parameters": parameters, "strict": True}
    body = {**ASK, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    response = it.client.post("/v1/chat/completions", body)
    if response.status_code == 400:
        return f"refused: {response.json()['error']['message']}"
    assert response.status_code == 200, response.text
    if named := response.headers.get(IGNORED):
        return f"named: {named}"
    grammar = it.engine.requests[-1].sampling.grammar
    assert grammar is not None
    try:
        held = [any(takes(grammar, said) for said in spellings(form, parameters, each)) for each in (right, wrong)]
    except InvalidGrammar as error:  # as a server answers that tries a grammar before a request is run
        return f"refused: {error}"
    return {(True, False): "held", (True, True): "in silence"}.get((held[0], held[1]), f"takes {held}")


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("name", CASES)
def test_no_keyword_of_an_argument_is_dropped_in_silence(talk: Make, form: str, name: str) -> None:
    schema, right, wrong, others = CASES[name]
    parameters = {**tool("f", a=schema)["function"]["parameters"], **COLOR}
    found = outcome(talk(TEMPLATES[form], reasoning="none"), form, parameters, {"a": right}, {"a": wrong})
    if others[:1] == ("named",):
        assert found == f"named: tools.0.function.parameters.properties.a.{others[1]}"
    else:
        assert found.partition(":")[0] == ("refused" if form in others else "held"), found


@pytest.mark.parametrize("form", [*JSON, *GEMMA4, *KEYED])
@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_no_keyword_that_binds_arguments_is_dropped_in_silence(talk: Make, form: str, name: str) -> None:
    schema, right, wrong, others = OF_ARGUMENTS[name]
    found = outcome(talk(TEMPLATES[form], reasoning="none"), form, {"type": "object", **schema}, right, wrong)
    assert found.partition(":")[0] == ("refused" if form in others else "held"), found
