"""Names unknown keywords of enforced JSON schemas, because they constrain nothing, like other unknown fields.

Enforced are the schemas of an answer, and those of the functions that it may call if they are `strict` or forced,
or if the answer has a schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from deployments.api.fields.ignored import IgnoredFields
from engine.grammar.schema_keywords import unknown_in

_PLACES = (
    "response_format.json_schema.schema",
    "structured_outputs.json",
    "guided_json",
    "json_schema",
    "text.format.schema",
    "output_config.format.schema",
    "output_format.schema",
)
"""Where requests to one or another API have a schema."""
_OF_ANSWERS = ("response_format", "text.format")
"""Fields that may ask for a JSON answer without a schema."""
_OF_ARGUMENTS = ("parameters", "input_schema")
"""Where a function has a schema."""
_UNFORCED = ("auto", "none")


def note_unknown(fields: Mapping[str, Any], ignored: IgnoredFields) -> None:
    """Ignore unknown keywords and formats by the rule for unknown fields. Raises `ApiError` if it refuses them."""
    schemas = {place: _read(_at(fields, place)) for place in _PLACES}
    for place, schema in [*schemas.items(), *_held_arguments(fields, any(schemas.values()))]:
        for where, value in unknown_in(schema):
            ignored.add(where, value, (), f"{place}.")


def _held_arguments(fields: Mapping[str, Any], has_schema: bool) -> Iterator[tuple[str, object]]:
    """Yield the schemas of functions to which calls are held, and where they are."""
    functions = list(_functions(fields))
    if not functions:
        return
    choice = fields.get("tool_choice") or fields.get("function_call") or "auto"
    name, is_forced = _chosen(choice)
    is_json = has_schema or any(_at(fields, f"{place}.type") == "json_object" for place in _OF_ANSWERS)
    if is_forced or is_json or any(function.get("strict") is True for _, function in functions):
        for place, function in functions:
            if name in (None, function.get("name")):
                yield from ((f"{place}.{field}", function[field]) for field in _OF_ARGUMENTS if field in function)


def _functions(fields: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects that describe functions, in the form of any of the APIs."""
    for field in ("tools", "functions"):
        yield from _functions_in(fields.get(field), field)


def _functions_in(tools: object, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        if isinstance(tool, dict):
            inside, place = tool.get("function"), f"{path}.{index}"
            yield (f"{place}.function", inside) if isinstance(inside, dict) else (place, tool)
            yield from _functions_in(tool.get("tools"), f"{place}.tools")


def _chosen(choice: object) -> tuple[str | None, bool]:
    """Return the name of the function that must be called, if only one may be, and whether any must be."""
    if not isinstance(choice, dict):
        return None, choice not in _UNFORCED
    kind = choice.get("type")
    if kind == "allowed_tools":
        return None, "required" in (choice.get("mode"), _at(choice, "allowed_tools.mode"))
    name = choice.get("name") or _at(choice, "function.name")
    return name if isinstance(name, str) else None, kind not in _UNFORCED


def _at(fields: Mapping[str, Any], place: str) -> Any:
    """Return the value at a place; None if there is none."""
    found: Any = fields
    for name in place.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _read(schema: object) -> object:
    """Return a schema that may be given as its text; None for text that is not JSON, which is refused
    elsewhere."""
    if not isinstance(schema, str):
        return schema
    try:
        found: object = json.loads(schema)
    except (ValueError, RecursionError):
        return None
    return found
