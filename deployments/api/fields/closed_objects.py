"""Closes the objects of a JSON schema: where it does not mention other properties, they are forbidden. The
standard allows them, and an unsure model would invent them without end. Schemas combined with `allOf` stay open,
because each part would forbid the others' properties.
"""

from __future__ import annotations

from typing import Any

from engine.grammar.schema_keywords import NO_SCHEMAS

_SAYS_MORE = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "anyOf", "oneOf", "$ref", "if"}
)


def closed(schema: Any) -> Any:
    """Return a schema whose objects with known properties have no others."""
    return schema if _has(schema, "allOf") else _closed(schema)


def _closed(node: Any) -> Any:
    if isinstance(node, list):
        return [_closed(child) for child in node]
    if not isinstance(node, dict):
        return node
    children = {key: value if key in NO_SCHEMAS else _closed(value) for key, value in node.items()}
    if isinstance(node.get("properties"), dict) and _SAYS_MORE.isdisjoint(node) and _is_schema(node):
        children["additionalProperties"] = False
    return children


def _is_schema(node: dict[str, Any]) -> bool:
    """Whether this is the schema of an object, and no object of properties, one of which is named `properties`."""
    return node.get("type", "object") == "object" and all(
        isinstance(child, dict | bool) for child in node["properties"].values()
    )


def _has(node: Any, keyword: str) -> bool:
    if isinstance(node, list):
        return any(_has(child, keyword) for child in node)
    return isinstance(node, dict) and (keyword in node or any(_has(child, keyword) for child in node.values()))
