"""The keywords of JSON Schema (draft 2020-12, and older ones with a meaning): which contain schemas, and which
constrain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from engine.grammar.texts import FORMATS

ONE = frozenset(
    {"items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
     "propertyNames", "not", "if", "then", "else"}
)  # fmt: skip
"""Keywords with one schema."""
LISTED = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
"""Keywords with a list of schemas, as `items` may be one."""
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords with an object of schemas."""
NO_SCHEMAS = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values may look like schemas and are none."""
OF_TEXTS = frozenset({"minLength", "maxLength", "pattern", "format"})
OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OF_TYPES = {
    "string": OF_TEXTS,
    "number": OF_NUMBERS,
    "array": frozenset(
        {"items", "additionalItems", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems",
         "contains", "minContains", "maxContains"}
    ),
    "object": frozenset(
        {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames",
         "required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"}
    ),
}  # fmt: skip
"""Keywords that constrain values of one type."""
_OF_ALL_TYPES = frozenset(
    {"enum", "const", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then",
     "else"}
)  # fmt: skip
_OTHERS = frozenset({"type", "title", "description", "deprecated", "readOnly", "writeOnly", "id", "x-guidance"})
_KNOWN = ONE | LISTED | NAMED | NO_SCHEMAS | _OTHERS | frozenset[str]().union(*_OF_TYPES.values())


def _is_anything(value: object, _: dict[str, Any]) -> bool:
    return value is True or value == {}


def _is_nothing(value: object, _: dict[str, Any]) -> bool:
    return value == {}


_VACUOUS: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "format": lambda value, _: isinstance(value, str) and value not in FORMATS,
    "uniqueItems": lambda value, _: value is False,
    "propertyNames": _is_anything,
    "unevaluatedProperties": _is_anything,
    "unevaluatedItems": _is_anything,
    "dependentRequired": _is_nothing,
    "dependentSchemas": _is_nothing,
    "dependencies": _is_nothing,
    "minContains": lambda _, schema: "contains" not in schema,
    "maxContains": lambda _, schema: "contains" not in schema,
    "if": lambda _, schema: "then" not in schema and "else" not in schema,
    "then": lambda _, schema: "if" not in schema,
    "else": lambda _, schema: "if" not in schema,
}
"""For keywords: whether a value constrains nothing, in a schema."""


def is_vacuous(keyword: str, schema: dict[str, Any]) -> bool:
    """Whether a keyword of the standard constrains nothing in this schema."""
    says_nothing = _VACUOUS.get(keyword)
    return says_nothing is not None and says_nothing(schema[keyword], schema)


def binding(schema: dict[str, Any], kinds: Collection[str]) -> list[str]:
    """Return the keywords, besides `type`, that constrain values of these types. An integer is a number."""
    found = _OF_ALL_TYPES.union(*(_OF_TYPES.get(kind, ()) for kind in kinds))
    return [keyword for keyword in schema if keyword in found and not is_vacuous(keyword, schema)]


def unknown_in(schema: object) -> Iterator[tuple[str, object]]:
    """Yield the places and values of keywords that constrain nothing although their author may expect it: keywords
    that the standard does not know, unknown formats, and the content of texts (`contentEncoding`).
    """
    nodes: list[tuple[str, object]] = [("", schema)]
    while nodes:
        place, node = nodes.pop()
        if not isinstance(node, dict):
            continue
        for keyword, value in node.items():
            here = f"{place}{keyword}"
            if (keyword not in _KNOWN and not keyword.startswith("$")) or (
                keyword == "format" and is_vacuous(keyword, node)
            ):
                yield here, value
            elif keyword in NAMED and isinstance(value, dict):
                nodes += [(f"{here}.{name}.", child) for name, child in value.items()]
            elif isinstance(value, list) and (keyword in LISTED or keyword in ONE):
                nodes += [(f"{here}.{index}.", child) for index, child in enumerate(value)]
            elif keyword in ONE:
                nodes.append((f"{here}.", value))


def num_properties(schema: object) -> int:
    """Return how many properties the objects of a schema name."""
    count, nodes = 0, [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            named = node.get("properties")
            count += len(named) if isinstance(named, dict) else 0
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
    return count
