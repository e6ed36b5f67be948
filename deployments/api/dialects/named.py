"""The functions that an answer may call, and their schemas of arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Number
from typing import Any

from deployments.api.base import exact_json

Functions = Mapping[str, "dict[str, Any] | None"]
"""The schemas of the functions' arguments, by the functions' names; None where there are no arguments."""
ANYTHING = frozenset({"string", "number", "boolean", "null", "array", "object"})
"""The types of JSON, where an integer is a number."""
TEXT_OR_NULL = frozenset({"string", "null"})
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
_MAX_STEPS = 64
"""References and alternatives that are followed before a schema counts as one of anything."""


def object_of(arguments: str) -> dict[str, Any] | None:
    """Return the object that arguments, given as JSON, are; None if they are none, or one with a name twice."""
    try:
        values = exact_json.parse_encodable(arguments, _distinct)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _distinct(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        raise ValueError("an object has a name twice")
    return found


def properties(schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schemas of the arguments that a function's schema names."""
    named = (schema or {}).get("properties")
    return named if isinstance(named, dict) else {}


def kinds(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema may allow, which may refer to `root`; all, where it does not say."""
    found, left = set[str](), [schema]
    for _ in range(_MAX_STEPS):
        if not left:
            return frozenset("number" if kind == "integer" else kind for kind in found)
        one = left.pop()
        if isinstance(one, dict) and isinstance(reference := one.get("$ref"), str):
            one = referred(reference, root)
        if not isinstance(one, dict):
            return ANYTHING
        kind, alternatives = one.get("type"), one.get("anyOf") or one.get("oneOf")
        if isinstance(kind, str | list):
            found.update([kind] if isinstance(kind, str) else kind)
        elif "const" in one or isinstance(one.get("enum"), list):
            found.update(kind_of(value) for value in one.get("enum") or [one.get("const")])
        elif isinstance(alternatives, list):
            left += alternatives
        else:
            return ANYTHING
    return ANYTHING


def kind_of(value: object) -> str:
    """Return the type of a value of JSON."""
    names = ((bool, "boolean"), (str, "string"), (Number, "number"), (list, "array"), (dict, "object"))
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def as_json(text: str, allowed: frozenset[str]) -> str:
    """Return a value as JSON: as it is written if that is JSON of an allowed type, or a text."""
    written = _PYTHONS.get(text.strip(), text.strip())
    try:
        value = exact_json.parse(written)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    is_meant = kind_of(value) in allowed and (kind_of(value) != "string" or allowed != TEXT_OR_NULL)
    return written if is_meant or "string" not in allowed else json.dumps(text, ensure_ascii=False)


def referred(reference: str, root: Mapping[str, Any]) -> object:
    """Return the schema to which a reference within `root` refers; None if there is none."""
    found: object = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
