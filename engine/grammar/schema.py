"""Rewrites JSON schemas so that llguidance handles them correctly. The same values stay valid.

    {"format": "password"}                              ─▶ {}: keywords without effect are omitted
    {"patternProperties": {"^(a|b)$": S}}               ─▶ {"properties": {"a": S, "b": S}}
    {"$ref": "#/$defs/endless"}, which requires itself  ─▶ false

llguidance lets names that a pattern matches be repeated, or be begun when all of them are taken. It handles
`properties` correctly, so names that can be enumerated become properties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from engine.base.errors import InvalidGrammar
from engine.grammar.languages import contradicts_itself, texts_of_pattern
from engine.grammar.least_set import least_set
from engine.grammar.schema_keywords import NAMED, NO_SCHEMAS, is_vacuous

OPTIONS: dict[str, Any] = {
    # Nothing is ignored or approximated: either the answer validates, or the grammar is rejected.
    "lenient": False,
    "coerce_one_of": False,
    # A blank, or a new line with indentation. Without a bound, an uncertain model would write blanks forever.
    "whitespace_pattern": r" |\n[ \t]{0,16}",
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    # No \u: a name that is written in two ways would not be recognized as the same.
    "json_allowed_escapes": '"\\bfnrt',
}
"""llguidance's options for JSON schemas."""
_MOST_NAMES = 128
"""Most names of one pattern that become properties."""
_MOST_COPIED = 4096
"""Most objects in the schemas of such names."""
_MOST_NAMED = 3
"""Most references that an error names."""


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the same valid values. Raises InvalidGrammar if there are none, or if llguidance would
    handle it incorrectly.
    """
    try:
        targets = _targets(schema)
        found = _mapped(schema, keeps_patterns=any("/patternProperties/" in reference for reference in targets))
        return _without_endless(found)
    except RecursionError:
        raise InvalidGrammar("the schema is nested too deeply: recursion limit exceeded") from None


def _mapped(node: Any, keeps_patterns: bool) -> Any:
    """Rewrite a node, which is a schema or contains some, after all nodes below it."""
    if isinstance(node, list):
        return [_mapped(child, keeps_patterns) for child in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if not is_vacuous(key, node)}
    children = _with_parts(kept, lambda part: _mapped(part, keeps_patterns))
    found = children if keeps_patterns else _with_counted_names(children)
    _check_names_can_be_counted(found)
    return found


def _with_parts(node: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a node with its parts changed."""
    return {
        key: value
        if key in NO_SCHEMAS
        else {name: change(part) for name, part in value.items()}
        if key in NAMED and isinstance(value, dict)
        else change(value)
        for key, value in node.items()
    }


# --- names -------------------------------------------------------------------------------------------------


def _with_counted_names(node: dict[str, Any]) -> dict[str, Any]:
    """Turn names that patterns match into properties, if they are few."""
    patterns, own = node.get("patternProperties"), node.get("properties", {})
    if isinstance(patterns, dict) and isinstance(own, dict):
        few = dict(_few_names(patterns))
        properties = dict(own)
        for pattern, names in few.items():
            for name in names:
                properties[name] = _both(properties.get(name, True), patterns[pattern])
        rest = {pattern: schema for pattern, schema in patterns.items() if pattern not in few}
        some = {pattern: schema for pattern, schema in patterns.items() if few.get(pattern) != []}
        return _counted({**node, "patternProperties": some}, properties, rest)
    return node


def _few_names(patterns: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for pattern, schema in patterns.items():
        names = texts_of_pattern(pattern, min(_MOST_NAMES, max(1, _MOST_COPIED // _num_objects(schema))))
        if names is not None:
            yield pattern, names


def _counted(node: dict[str, Any], properties: dict[str, Any], patterns: dict[str, Any]) -> dict[str, Any]:
    """Return `node` with these properties, if llguidance can count them for its `maxProperties`."""
    most, required = node.get("maxProperties"), node.get("required", [])
    changed = {**node, "properties": properties, "patternProperties": patterns}
    if not isinstance(most, int) or not isinstance(required, list) or all(name in required for name in properties):
        return changed
    if not patterns and node.get("additionalProperties") is False and most >= len(properties):
        del changed["maxProperties"]
        return changed
    return node


def _both(one: Any, other: Any) -> Any:
    return other if one is True else {"allOf": [one, other]}


def _num_objects(node: Any) -> int:
    """Return the number of objects in a value, plus one."""
    count, nodes = 1, [node]
    while nodes:
        found = nodes.pop()
        count += isinstance(found, dict)
        nodes += found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return count


def _check_names_can_be_counted(node: dict[str, Any]) -> None:
    """Reject a minProperties for which llguidance would count a repeated name more than once."""
    least, required = node.get("minProperties"), node.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > num_required + 1:
        raise InvalidGrammar(
            "minProperties is not supported above the number of required properties plus one: "
            f"got {least}, with {num_required} required"
        )


# --- values without an end -----------------------------------------------------------------------------------


def _without_endless(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace references to schemas that no finite value matches by false. Raises InvalidGrammar if none is left.

    llguidance omits alternatives that contradict themselves, but not those that are endless. So if a reference
    leads back to itself, llguidance is asked which of its alternatives contradict themselves.
    """
    found = _targets(schema)
    targets = {"#": schema, **found}
    others = {name: _targets(target) for name, target in targets.items()}
    is_recursive = len(least_set(targets, lambda name, is_in: all(map(is_in, others[name])))) < len(targets)

    def has_value(reference: str, is_finite: Callable[[str], bool]) -> bool:
        def is_known(other: str) -> bool:
            return other not in targets or is_finite(other)

        target = targets[reference]
        return _has_finite(target, is_known) and not (is_recursive and contradicts_itself(_cut(target, is_known)))

    finite = least_set(targets, has_value)
    endless = targets.keys() - finite
    if "#" in endless:
        if not has_value("#", lambda _: True):
            return schema  # llguidance finds contradictions
        named = " or ".join(sorted(f'"{reference}"' for reference in endless if reference in found)[:_MOST_NAMED])
        raise InvalidGrammar(
            f"no value matches, because a $ref that is needed ({named}) leads back to itself without end, or "
            "matches nothing; make the value optional, or allow another instead"
        )
    if not endless:
        return schema
    return dict(_with_references(schema, lambda node: False if node["$ref"] in endless else node))


def _cut(target: Any, is_finite: Callable[[str], bool]) -> Any:
    """Return a schema without references: each is replaced by the keywords next to it, or by false."""

    def change(node: dict[str, Any]) -> Any:
        return is_finite(node["$ref"]) and {key: value for key, value in node.items() if key != "$ref"}

    own = target
    if isinstance(target, dict):
        own = {key: value for key, value in target.items() if key not in ("$defs", "definitions")}
    return _with_references(own, change)


def _targets(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the targets of a schema's references within it; none if `$id` gives them another meaning."""
    found: dict[str, Any] = {}
    nodes: list[Any] = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, dict):
            if isinstance(node.get("$id"), str) and node is not schema:
                return {}
            reference = node.get("$ref")
            if isinstance(reference, str) and reference not in found:
                found[reference] = _target(schema, reference)
            _with_parts(node, nodes.append)  # only to find them
    return found


def _target(schema: dict[str, Any], reference: str) -> Any:
    """Return the target of a JSON pointer; true if there is none, or it is another kind of reference."""
    node: Any = schema
    if not reference.startswith("#/"):
        return node if reference == "#" else True
    for part in unquote(reference[2:]).split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return True
    return node


def _has_finite(node: Any, is_finite: Callable[[str], bool]) -> bool:
    """Whether a finite value may match; `is_finite` says so of a reference. False only if none can."""
    if not isinstance(node, dict):
        return node is not False
    if node.get("enum") == []:
        return False
    reference = node.get("$ref")
    if isinstance(reference, str) and not is_finite(reference):
        return False
    if not all(_has_finite(part, is_finite) for part in _list(node.get("allOf"))):
        return False
    for several in ("anyOf", "oneOf"):
        options = _list(node.get(several))
        if options and not any(_has_finite(part, is_finite) for part in options):
            return False
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return (
        not all(kind in ("array", "object") for kind in kinds)
        or ("array" in kinds and all(_has_finite(part, is_finite) for part in _required_items(node)))
        or ("object" in kinds and _has_finite_object(node, is_finite))
    )


def _has_finite_object(node: dict[str, Any], is_finite: Callable[[str], bool]) -> bool:
    properties, patterns = node.get("properties", {}), node.get("patternProperties", {})
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        return True  # llguidance reports the error
    rest, required = node.get("additionalProperties", True), _list(node.get("required"))
    # A required name that is no property may match a pattern.
    needed = [properties.get(name, bool(patterns) or rest) for name in required if isinstance(name, str)]
    if not all(_has_finite(value, is_finite) for value in needed):
        return False
    least = node.get("minProperties")
    if not isinstance(least, int) or least <= len(required):
        return True
    others = [value for name, value in properties.items() if name not in required]
    return any(_has_finite(value, is_finite) for value in [*others, *patterns.values(), rest])


def _required_items(node: dict[str, Any]) -> Iterator[Any]:
    least, items = node.get("minItems"), node.get("items", True)
    given = _list(node.get("prefixItems")) or _list(items)
    rest = node.get("additionalItems", True) if isinstance(items, list) else items
    if isinstance(least, int) and least > 0:
        yield from given[:least]
        if least > len(given):
            yield rest


def _with_references(node: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a node in which each object with a reference is changed."""
    if isinstance(node, list):
        return [_with_references(child, change) for child in node]
    if isinstance(node, dict) and isinstance(node.get("$ref"), str):
        node = change(node)
    return _with_parts(node, lambda part: _with_references(part, change)) if isinstance(node, dict) else node


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
