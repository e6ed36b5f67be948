"""Checks that JSON has the form of a JSON schema; its meaning is left to the engines, which enforce it."""

from __future__ import annotations

from typing import Any

from deployments.api.base import exact_json
from deployments.api.base.errors import invalid, quoted
from deployments.api.base.field_checks import at_most, check_depth
from deployments.config.limits import Limits
from engine.grammar.schema_keywords import LISTED, NAMED, ONE

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


class _Fault(Exception):
    """A fault in a schema; the message follows the place of the fault."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(message)
        self.place, self.message = place, message


def check_parameters(schema: dict[str, Any], limits: Limits, param: str) -> None:
    """Raise `ApiError` 400 unless this is a schema of an object, and not too large."""
    at_most(limits, "max_grammar_bytes", param, len(exact_json.encode(schema)), "bytes")
    check_depth(limits, "max_schema_depth", schema, param)
    kind = schema.get("type", "object")
    if kind != "object":
        raise invalid(f'{param}.type must be "object", because arguments have names; got {quoted(kind)}.', param)
    try:
        _check(schema, "")
    except _Fault as fault:
        where = f" at {fault.place[:128]}" if fault.place else ""
        raise invalid(f"{param} is not a JSON schema:{where} {fault.message}.", param) from None


def _check(schema: object, place: str) -> None:
    """Check a schema recursively, after its depth was checked. Raises `_Fault`."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _Fault(place, f"a schema (an object or a boolean) was expected, got {quoted(schema)}")
    for keyword, value in schema.items():
        here = f"{place}.{keyword}".lstrip(".")
        if keyword in NAMED:
            if not isinstance(value, dict):
                raise _Fault(here, f"an object of schemas was expected, got {quoted(value)}")
            for name, child in value.items():
                _check(child, f"{here}.{name}")
        elif keyword in LISTED or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list) or not value:
                raise _Fault(here, f"a list of schemas was expected, got {quoted(value)}")
            for index, child in enumerate(value):
                _check(child, f"{here}.{index}")
        elif keyword in ONE:
            _check(value, here)
        else:
            _check_plain(keyword, value, here)


def _check_plain(keyword: str, value: object, place: str) -> None:
    """Check keywords that hold no schemas. Unknown ones are annotations, as the standard says."""
    if keyword == "type":
        kinds = value if isinstance(value, list) and value else [value]
        for kind in kinds:
            if not isinstance(kind, str) or kind not in _TYPES:
                raise _Fault(place, f"one of {', '.join(sorted(_TYPES))} was expected, got {quoted(kind)}")
    elif keyword == "required":
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _Fault(place, f"a list of names was expected, got {quoted(value)}")
    elif keyword == "enum" and not isinstance(value, list):
        raise _Fault(place, f"a list of values was expected, got {quoted(value)}")
