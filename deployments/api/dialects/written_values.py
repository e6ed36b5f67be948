"""Enforces schemas on values that a model writes in a syntax of its own, where no JSON schema applies. Each format
of calls enforces the keywords that it can; other keywords are refused, never silently ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from deployments.api.dialects.named import ANYTHING, kind_of, kinds, properties, referred
from engine.base.errors import InvalidGrammar
from engine.grammar.schema_keywords import OF_NUMBERS, OF_TEXTS, binding

Schema = dict[str, Any]
_CHOICES = ("enum", "const")
_OF_MEMBERS = ("properties", "required", "additionalProperties")
_DEFINITIONS = ("#/$defs/", "#/definitions/")
_ALONE = ("$ref", *_CHOICES, "anyOf", "oneOf")
"""Keywords that are not held together with most others."""
_MOVED = OF_TEXTS | OF_NUMBERS | {"type"}
"""Keywords that mean the same next to alternatives and within each of them."""


class Argument(NamedTuple):
    """An argument that a schema names."""

    name: str
    schema: Schema
    """It includes the definitions that it may refer to."""
    is_required: bool


def arguments_of(schema: Schema) -> list[Argument] | None:
    """Return the arguments of a function; None if they may have any names; `values_of` then describes their
    values. Raises InvalidGrammar for keywords that cannot be enforced where arguments are written one by one.
    """
    for keyword in binding(schema, ("object",)):
        if keyword not in _OF_MEMBERS:
            raise InvalidGrammar(
                f"{keyword} at the top of a schema is not supported: this model writes arguments one by one"
            )
    for reference in _references_in(schema):
        if not reference.startswith(_DEFINITIONS):
            raise InvalidGrammar(f"{reference} is not supported as a $ref: define that schema under $defs")
    named = members_of(schema)
    return (
        None
        if named is None
        else [
            Argument(name, _with_definitions(one, schema), name in (schema.get("required") or []))
            for name, one in named.items()
        ]
    )


def members_of(schema: Schema) -> dict[str, Schema | bool] | None:
    """Return the schemas of the members that an object may have, or must, in their order; None if a schema names
    none, so that they may have any names. Raises InvalidGrammar for one that must be there and cannot.
    """
    required, named = schema.get("required") or [], properties(schema)
    others = schema.get("additionalProperties", True)
    found = {**named, **{key: others for key in required if key not in named}}
    if not found and others is not False:
        return None
    for key in required:
        if found[key] is False:
            raise InvalidGrammar(f"{key[:64]!r} is required, and its schema allows no value")
    return {key: one for key, one in found.items() if one is not False}


def values_of(schema: Schema) -> Schema:
    """Return the schema of arguments that a function's schema does not name, with the definitions for it."""
    return _with_definitions(schema.get("additionalProperties", True), schema)


def _with_definitions(one: Schema | bool, root: Schema) -> Schema:
    shared: Schema = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**(one if isinstance(one, dict) else {}), **shared}


def _references_in(schema: object) -> Iterator[str]:
    """Yield the schemas to which any part of a schema refers."""
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if isinstance(reference := node.get("$ref"), str):
                yield reference
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node


def check_held(schema: Schema, held: Collection[str], allowed: Collection[str] = ANYTHING) -> None:
    """Raise InvalidGrammar if other keywords than these constrain values of the `allowed` types."""
    for keyword in binding(schema, allowed):
        if keyword not in held:
            other = next((f" next to {one}" for one in held if one in schema and one in _ALONE), "")
            raise InvalidGrammar(
                f"{keyword}{other} is not supported, because this model writes arguments in a syntax of its own"
            )


def target_of(schema: Schema, root: Mapping[str, Any]) -> Schema | bool | None:
    """Return the schema that a schema refers to; None if it refers to none. Raises InvalidGrammar."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return None
    found = referred(reference, root)
    if not isinstance(found, dict | bool):
        raise InvalidGrammar(f"{reference} refers to no schema of an object under $defs")
    check_held(schema, ("$ref",))
    if "type" in schema and (found is True or (found and schema["type"] != found.get("type"))):
        raise InvalidGrammar("type next to $ref is only supported if it is the type of the schema that $ref names")
    return found


def choices_of(schema: Schema, root: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists none. Raises InvalidGrammar."""
    listed = schema.get("enum")
    if not isinstance(listed, list) and "const" not in schema:
        return None
    check_held(schema, _CHOICES)
    choices = listed if isinstance(listed, list) else [schema["const"]]
    if "const" in schema:
        choices = [one for one in choices if _same(one, schema["const"])]
    allowed, told = kinds(schema, root), schema.get("type", "number")
    if "number" not in told and "integer" in told:
        choices = [one for one in choices if not isinstance(one, float) or one.is_integer()]
    found = [one for one in choices if kind_of(one) in allowed]
    if not found:
        raise InvalidGrammar("no value of an enum or a const has the type that its schema asks for")
    return found


def alternatives_of(schema: Schema, root: Mapping[str, Any]) -> list[Schema | bool] | None:
    """Return the schemas in `anyOf` or `oneOf`; None if there is neither. Raises InvalidGrammar."""
    name = "anyOf" if "anyOf" in schema else "oneOf"
    if not isinstance(given := schema.get(name), list):
        return None
    common = {key: schema[key] for key in schema if key in _MOVED}
    check_held(schema, {name, *_MOVED})
    found = [_joined(common, one, name) for one in given if one is not False]
    if name == "oneOf":
        met = [kind for one in found for kind in kinds(one, root)]
        if len(met) != len(set(met)):
            raise InvalidGrammar("oneOf is only supported if its schemas have different types; use anyOf")
    return found


def _joined(common: Schema, one: Schema | bool, name: str) -> Schema | bool:
    """Return a schema that requires both the keywords next to alternatives and those of one alternative."""
    if isinstance(one, bool):
        return {**common} or one
    for key in common.keys() & one.keys():
        if common[key] != one[key]:
            raise InvalidGrammar(f"{key} next to {name} is not supported if an alternative has another {key}")
    return {**common, **one}


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) and kind_of(one) == kind_of(other)
