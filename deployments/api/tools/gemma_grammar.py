"""Rules of a grammar for Gemma 4's arguments: JSON schemas over a syntax that is not JSON.

Numbers are left to llguidance's own schemas. An object has the properties that its schema names, in their order,
or any where it names none. What cannot be enforced is refused.
"""

from __future__ import annotations

from typing import Any

from deployments.api.tools.gemma import MARKS, QUOTE, key_written, value_written
from deployments.api.tools.named import ANYTHING, kind_of, kinds, properties, referred
from engine.errors import InvalidGrammar
from engine.grammar.compiler import schema_in_lark
from engine.grammar.lark import SpecialId, literal, separated, up_to_mark
from engine.grammar.schema_keywords import is_vacuous

Schema = dict[str, Any]
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_REFUSED = (
    "allOf", "not", "if", "pattern", "uniqueItems", "contains", "prefixItems", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
)  # fmt: skip
_ANY_KEY = r'/[^\s<>{}\[\],:"]([^<>{}\[\],:"\n]{0,62}[^\s<>{}\[\],:"])?/'


def argument_rules(name: str, schema: Schema, special: SpecialId) -> list[str]:
    """Return rules for what stands between the braces of a call; the first is called `name`.

    Raises InvalidGrammar.
    """
    for keyword in ("$ref", "anyOf", "oneOf"):
        if keyword in schema:
            raise InvalidGrammar(
                f"{keyword} at the top of a schema is not supported: this model writes arguments one by one"
            )
    rules = _Rules(name, schema, special)
    rules.members(name, schema)
    return rules.lines


class _Rules:
    """The rules for one function's arguments."""

    def __init__(self, name: str, root: Schema, special: SpecialId) -> None:
        self._name, self._root, self._special = name, root, special
        self._shared: dict[str, str] = {}
        """The rules of what a schema refers to, which may be itself; "" is any value."""
        self.lines: list[str] = []

    def members(self, rule: str, schema: Schema) -> None:
        """Add a rule for what stands between the braces of an object."""
        _refuse_some(schema)
        named, required = properties(schema), schema.get("required") or []
        parts = []
        for number, key in enumerate(dict.fromkeys([*named, *required])):
            child = named.get(key, True)
            if child is False and key not in required:
                continue
            written = self._literal(key_written(key), key)
            parts.append((f'{written} ":" {self._value(f"{rule}_{number}", child)}', key in required))
        others = schema.get("additionalProperties", True)
        if parts or others is False:
            self.lines += separated(rule, parts, ",")
            return
        key = f"({_ANY_KEY} | {self._text(f'{rule}_key')})"
        self.lines.append(f'{rule}: ({rule}_member ("," {rule}_member)*)?')
        self.lines.append(f'{rule}_member: {key} ":" {self._value(f"{rule}_any", others)}')

    def _value(self, rule: str, schema: Schema | bool) -> str:
        """Return the rule for a value of a schema: it is called `rule` and added, if there is none yet."""
        if schema is False:
            raise InvalidGrammar("a value whose schema is false cannot be written")
        if schema is True or not schema:
            return self._of_shared("", {"type": sorted(ANYTHING)})
        if isinstance(reference := schema.get("$ref"), str):
            found = referred(reference, self._root)
            if not isinstance(found, dict):
                raise InvalidGrammar(f"{reference} refers to no schema of an object under $defs")
            return self._of_shared(reference, found)
        _refuse_some(schema)
        allowed = kinds(schema, self._root)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(choices, list):
            meant = [choice for choice in choices if kind_of(choice) in allowed]
            options = [self._literal(value_written(one), one if isinstance(one, str) else "") for one in meant]
        elif isinstance(alternatives := schema.get("anyOf") or schema.get("oneOf"), list):
            if "anyOf" not in schema:
                self._check_excluded(alternatives)
            options = [self._value(f"{rule}_{number}", one) for number, one in enumerate(alternatives)]
        else:
            options = [self._of_kind(f"{rule}_{kind}", kind, schema) for kind in sorted(allowed)]
        self.lines.append(f"{rule}: {' | '.join(options)}")
        return rule

    def _of_shared(self, key: str, schema: Schema) -> str:
        if key not in self._shared:
            rule = self._shared[key] = f"{self._name}_shared_{len(self._shared)}"
            if (made := self._value(rule, schema)) != rule:
                self.lines.append(f"{rule}: {made}")
        return self._shared[key]

    def _of_kind(self, rule: str, kind: str, schema: Schema) -> str:
        """Return an expression for a value of one type, for which rules may be added that begin with `rule`."""
        if kind == "object":
            self.members(f"{rule}_members", schema)
            return f'"{{" {rule}_members "}}"'
        if kind == "array":
            return self._list(rule, schema)
        if kind == "string":
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            return self._text(rule, "*" if not least and most == "" else f"{{{least},{most}}}")
        if kind == "number":
            told = schema.get("type")
            given = told if isinstance(told, list) else [told]
            number = "integer" if "integer" in given and "number" not in given else "number"
            bounds = {keyword: schema[keyword] for keyword in _OF_NUMBERS if keyword in schema}
            self.lines.append(f"{rule}: {schema_in_lark({'type': number, **bounds})}")
            return rule
        return '"null"' if kind == "null" else '("true" | "false")'

    def _list(self, rule: str, schema: Schema) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        items = schema.get("items", True)
        if most == 0 or (items is False and not least):
            return '"[" "]"'
        item = self._value(f"{rule}_item", items)
        count = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        several = item if most == 1 else f'{item} ("," {item}){count}'
        return f'"[" {several} "]"' if least else f'"[" ({several})? "]"'

    def _text(self, rule: str, count: str = "*") -> str:
        """Return an expression for a text in its marks, for which a rule is added."""
        self.lines.append(up_to_mark(f"{rule}_text", QUOTE, self._special, count=count))
        return f"{self._literal(QUOTE)} {rule}_text"

    def _literal(self, text: str, inside: str = "") -> str:
        """Return an expression for this text. Raises InvalidGrammar if `inside` of it is a mark of texts."""
        if QUOTE in inside:
            raise InvalidGrammar(f"{inside!r} cannot be written in this model's format of calls")
        return literal(text, MARKS, self._special)

    def _check_excluded(self, alternatives: list[Any]) -> None:
        """Raise InvalidGrammar unless schemas exclude each other by type, so that one of them is any of them."""
        met = [kind for one in alternatives for kind in kinds(one, self._root)]
        if len(met) != len(set(met)):
            raise InvalidGrammar("oneOf is only supported where its schemas exclude each other by type; use anyOf")


def _refuse_some(schema: Schema) -> None:
    for keyword in _REFUSED:
        if keyword in schema and not is_vacuous(keyword, schema):
            raise InvalidGrammar(
                f"{keyword} is not supported, because this model writes arguments in a syntax of its own"
            )
