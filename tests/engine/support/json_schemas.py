"""Two hundred schemas in the style of the JSON Schema test suite: each keyword alone, at its edges, and combined.

All are bounded, so that any model's answer ends: strings have a maxLength, arrays maxItems, numbers both bounds,
and objects say that nothing is additional, or how much.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product
from typing import Any

Schema = dict[str, Any] | bool
Named = Iterator[tuple[str, Schema]]

WORD: Schema = {"type": "string", "maxLength": 6}
DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
PATTERNS = (
    "^[a-z]{1,5}$", "^(foo|bar|baz)$", "^a+b?$", "^[^x-z]{2,4}$", "^\\d{3}-\\d{4}$", "^(\\([0-9]{3}\\))?[0-9]{3}$",
    "^[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8})?$", "^[\u00c0-\u00ff]{2}$", "^.{3}$", "^\\S{1,4}$",
    "^(a|(b|(c|d)e)f)g$", "^\"\\\\?$", "^#[0-9a-fA-F]{6}$", "^v[0-9]{1,2}(\\.[0-9]{1,2}){2}$",
    "^[\\w.]{1,5}@[\\w]{1,5}\\.(com|org)$", "es", "^pre", "fin$",
)  # fmt: skip


def record(*required: str, **properties: Schema) -> dict[str, Any]:
    """An object of these properties and no others; all are required unless some are named."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
    }


def schemas() -> dict[str, Schema]:
    """Return all schemas by name."""
    parts = (
        _types, _enums, _strings, _numbers, _arrays, _objects, _combined, _references, _composed,
    )  # fmt: skip
    named = [entry for part in parts for entry in part()]
    assert len(dict(named)) == len(named)
    return dict(named)


def _types() -> Named:
    for kind, bounds in (
        ("null", {}),
        ("boolean", {}),
        ("integer", {"minimum": -5, "maximum": 5}),
        ("number", {"minimum": 0, "maximum": 1}),
        ("string", {"maxLength": 4}),
        ("array", {"maxItems": 0}),
        ("object", {"additionalProperties": False}),
    ):
        yield f"type {kind}", {"type": kind, **bounds}
    for one, other in combinations(("null", "boolean", "integer", "string"), 2):
        yield f"type {one} or {other}", {"type": [one, other], "minimum": 0, "maximum": 3, "maxLength": 3}
    yield (
        "a bounded type among several",
        {"type": ["integer", "null", "string"], "minimum": 3, "maximum": 7, "maxLength": 2},
    )
    yield "title and description say nothing", {"title": "t", "description": "d", "default": 5, "type": "boolean"}
    yield "an unknown keyword says nothing", {"type": "null", "foo": {"bar": 1}}
    yield "a dialect", {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "boolean"}


def _enums() -> Named:
    values = [
        None,
        True,
        False,
        0,
        -1,
        1.5,
        1e3,
        "",
        "a b",
        'quo"te',
        "back\\slash",
        "né\n",
        [],
        [1, [2]],
        {},
        {"k": [None]},
    ]
    for value in values:
        yield f"const {value!r}", {"const": value}
    yield "enum of strings", {"enum": ["red", "green", "blue"]}
    yield "enum of all kinds", {"enum": values}
    yield "enum with prefixes of each other", {"enum": ["a", "ab", "abc", "abcd"]}
    yield "enum of integers", {"enum": [1, 10, 100]}
    yield "enum that the type narrows", {"type": "string", "enum": ["x", 1, None, "y"]}
    yield "enum of 300", {"enum": [f"value-{n}" for n in range(300)]}


def _strings() -> Named:
    for low, high in ((0, 0), (1, 1), (0, 3), (2, 5), (10, 10), (7, 30)):
        yield f"length {low} to {high}", {"type": "string", "minLength": low, "maxLength": high}
    for pattern in PATTERNS:
        yield f"pattern {pattern}", {"type": "string", "pattern": pattern, "maxLength": 30}
    yield "pattern and length", {"type": "string", "pattern": "^[ab]*$", "minLength": 3, "maxLength": 5}
    for name in FORMATS:
        yield f"format {name}", {"type": "string", "format": name, "maxLength": 60}


def _numbers() -> Named:
    for low, high in ((0, 0), (-1, 1), (7, 13), (-120, -5), (99, 10001), (-3, 250), (2**40, 2**40 + 3)):
        yield f"integer {low} to {high}", {"type": "integer", "minimum": low, "maximum": high}
        yield (
            f"integer above {low}",
            {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1},
        )
    for least, most in ((0, 1), (-2.5, 3.25), (0.001, 0.002), (10, 20), (-1, -0.5)):
        yield f"number {least} to {most}", {"type": "number", "minimum": least, "maximum": most}
        yield f"number above {least}", {"type": "number", "exclusiveMinimum": least, "exclusiveMaximum": most}
    for step in (2, 3, 7, 10, 25):
        yield f"multiple of {step}", {"type": "integer", "multipleOf": step, "minimum": 0, "maximum": 500}
    yield "multiple below zero", {"type": "integer", "multipleOf": 5, "minimum": -100, "maximum": -1}


def _arrays() -> Named:
    for low, high in ((0, 0), (0, 1), (1, 1), (0, 3), (2, 4), (5, 5), (1, 9)):
        yield f"{low} to {high} items", {"type": "array", "items": DIGIT, "minItems": low, "maxItems": high}
    items: dict[str, Schema] = {
        "words": WORD,
        "booleans": {"type": "boolean"},
        "records": record(a=DIGIT),
        "enums": {"enum": ["x", 1]},
        "either": {"anyOf": [{"type": "null"}, DIGIT]},
    }
    for name, item in items.items():
        yield f"array of {name}", {"type": "array", "items": item, "minItems": 1, "maxItems": 3}
    nested: Schema = DIGIT
    for depth in range(1, 6):
        nested = {"type": "array", "items": nested, "minItems": 1, "maxItems": 2}
        yield f"arrays {depth} deep", nested
    pair = [DIGIT, WORD]
    yield "tuple", {"type": "array", "prefixItems": pair, "items": False, "minItems": 2}
    yield "tuple that may be shorter", {"type": "array", "prefixItems": pair, "items": False}
    yield (
        "tuple with more of a kind",
        {"type": "array", "prefixItems": pair, "items": {"type": "null"}, "maxItems": 4},
    )
    yield "a tuple of one", {"type": "array", "prefixItems": [WORD], "items": False, "minItems": 1}
    yield "anything in it", {"type": "array", "prefixItems": [True, False]}
    yield "no items", {"type": "array", "items": False}


def _objects() -> Named:
    names = ("a", "b", "c")
    for count in range(4):
        properties = dict.fromkeys(names[:count], DIGIT)
        yield f"{count} properties, all required", record(**properties)
    for wanted in chain.from_iterable(combinations(names, count) for count in range(3)):
        yield f"required of three: {wanted}", {**record(**dict.fromkeys(names, DIGIT)), "required": list(wanted)}
    for name in ("with space", "", 'quo"te', "back\\slash", "ünïcode", "$ref", "line\nbreak", "a.b/c~d"):
        yield f"property {name!r}", record(**{name: DIGIT})
    yield "required before its place", {**record(a=DIGIT, b=WORD), "required": ["b", "a"]}
    yield (
        "additional ones of a kind",
        {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2},
    )
    yield "at least one", {"type": "object", "additionalProperties": DIGIT, "minProperties": 1, "maxProperties": 3}
    yield (
        "exactly two",
        {
            "type": "object",
            "required": ["a"],
            "additionalProperties": {"const": 1},
            "minProperties": 2,
            "maxProperties": 2,
        },
    )
    yield (
        "pattern properties",
        {
            "type": "object",
            "patternProperties": {"^x[0-9]{1,2}$": DIGIT},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 3,
        },
    )
    yield (
        "properties and a pattern",
        {
            **record(id=DIGIT),
            "patternProperties": {"^y_[a-z]{1,3}$": {"type": "boolean"}},
            "maxProperties": 3,
        },
    )
    yield (
        "a required one that has no schema",
        {
            "type": "object",
            "required": ["only"],
            "additionalProperties": {"type": "boolean"},
            "maxProperties": 2,
        },
    )
    yield "a property that must not be", {**record(a=DIGIT, b=False), "required": ["a"]}
    yield "objects 6 deep", _deep(6)
    yield "sixty properties", {**record(**{f"p{n}": {"type": "null"} for n in range(60)}), "required": ["p59"]}


def _deep(levels: int) -> Schema:
    inner: Schema = DIGIT
    for level in range(levels):
        inner = record(**{f"level_{level}": inner})
    return inner


def _combined() -> Named:
    kinds: dict[str, Schema] = {
        "null": {"type": "null"},
        "word": WORD,
        "digit": DIGIT,
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "record": record(k=DIGIT),
    }
    for one, other in product(kinds, repeat=2):
        if one < other:
            yield f"any of {one} and {other}", {"anyOf": [kinds[one], kinds[other]]}
            yield f"one of {one} and {other}", {"oneOf": [kinds[one], kinds[other]]}
    yield "any of one", {"anyOf": [DIGIT]}
    yield (
        "any of overlapping",
        {"anyOf": [{**DIGIT, "maximum": 5}, {**DIGIT, "minimum": 4}, {"enum": [4, "four"]}]},
    )
    yield (
        "one of tagged records",
        {"oneOf": [record(kind={"const": kind}, value=value) for kind, value in (("w", WORD), ("d", DIGIT))]},
    )
    yield "all of bounds", {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 8}, {"multipleOf": 2}]}
    yield (
        "all of properties",
        {
            "allOf": [
                {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
                {"properties": {"b": WORD}, "required": ["b"]},
            ],
            "maxProperties": 2,
        },
    )
    yield "all of patterns", {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "z$"}], "maxLength": 6}
    yield (
        "any of within all of",
        {"allOf": [{"anyOf": [DIGIT, {"type": "null"}]}, {"type": "integer", "minimum": 5}]},
    )
    yield "siblings of any of", {**record(t=DIGIT), "anyOf": [{"properties": {"t": {"minimum": 5}}}, {}]}


def _references() -> Named:
    yield (
        "ref to a definition",
        {"$defs": {"d": DIGIT}, **record(a={"$ref": "#/$defs/d"}, b={"$ref": "#/$defs/d"})},
    )
    yield "ref to a ref", {"$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"type": "null"}}, "$ref": "#/$defs/x"}
    yield "ref within definitions of old", {"definitions": {"d": WORD}, "$ref": "#/definitions/d"}
    yield "ref to a property", record(a=DIGIT, b={"$ref": "#/properties/a"})
    yield "ref with escapes", {"$defs": {"a/b": {"~": {"type": "boolean"}}}, "$ref": "#/$defs/a~1b/~0"}
    yield (
        "recursive list",
        {
            "$defs": {"node": {**record(v=DIGIT), "properties": {"v": DIGIT, "next": {"$ref": "#/$defs/node"}}}},
            "type": "array",
            "maxItems": 1,
            "items": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
    )
    yield (
        "ref beside other keywords",
        {"$defs": {"d": {"type": "integer", "minimum": 0}}, "$ref": "#/$defs/d", "maximum": 3},
    )
    yield (
        "ref to an anchor of the root",
        {"$id": "https://example.org/s", "$defs": {"d": DIGIT}, "$ref": "#/$defs/d"},
    )


def _composed() -> Named:
    """Schemas such as people really use."""
    yield (
        "a person",
        record(
            name={"type": "string", "minLength": 1, "maxLength": 12},
            age={"type": "integer", "minimum": 0, "maximum": 120},
            email={"anyOf": [{"type": "string", "format": "email", "maxLength": 20}, {"type": "null"}]},
            tags={"type": "array", "items": {"enum": ["admin", "user", "guest"]}, "maxItems": 2},
        ),
    )
    yield (
        "a tool call",
        record(
            name={"const": "get_weather"},
            arguments=record(
                "city", city=WORD, unit={"enum": ["c", "f"]}, days={"type": "integer", "minimum": 1, "maximum": 7}
            ),
        ),
    )
    yield (
        "tool calls",
        {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {"anyOf": [record(name={"const": n}, arguments=record(x=DIGIT)) for n in ("add", "mul")]},
        },
    )
    yield "an order", record(
        id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        lines={"type": "array", "minItems": 1, "maxItems": 2,
               "items": record(sku=WORD, count={"type": "integer", "minimum": 1, "maximum": 99},
                               price={"type": "number", "minimum": 0, "maximum": 100})},
        shipped={"type": "boolean"},
        note={"type": ["string", "null"], "maxLength": 5},
    )  # fmt: skip
    yield (
        "a classification",
        record(
            label={"enum": ["positive", "negative", "neutral"]},
            confidence={"type": "number", "minimum": 0, "maximum": 1},
            spans={
                "type": "array",
                "maxItems": 2,
                "items": {"type": "array", "prefixItems": [DIGIT, DIGIT], "items": False, "minItems": 2},
            },
        ),
    )
    yield (
        "an expression",
        {
            "$defs": {
                "leaf": {"anyOf": [DIGIT, {"enum": ["x", "y"]}]},
                "sum": record(
                    op={"const": "+"},
                    args={"type": "array", "items": {"$ref": "#/$defs/leaf"}, "minItems": 2, "maxItems": 2},
                ),
            },
            "anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/sum"}],
        },
    )
    yield (
        "a point cloud",
        {"type": "array", "minItems": 3, "maxItems": 3, "items": record(x=DIGIT, y=DIGIT, z=DIGIT)},
    )
    yield "a configuration", record(
        "version", version={"const": 2}, on={"type": "boolean"},
        ports={"type": "object", "additionalProperties": False, "maxProperties": 2,
               "patternProperties": {"^[a-z]{1,6}$": {"type": "integer", "minimum": 1, "maximum": 65535}}},
    )  # fmt: skip
