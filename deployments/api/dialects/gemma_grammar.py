"""Rules of a grammar for Gemma 4's arguments: JSON schemas over a syntax that is not JSON.

Numbers are left to llguidance's own schemas. An object has the properties that its schema names, in their order,
or any if it names none. Keywords that cannot be enforced are refused.
"""

from __future__ import annotations

from deployments.api.dialects.gemma import MARKS, QUOTE, key_written, value_written
from deployments.api.dialects.named import ANYTHING, kinds
from deployments.api.dialects.written_values import (
    Schema,
    alternatives_of,
    check_held,
    choices_of,
    members_of,
    target_of,
)
from engine.base.errors import InvalidGrammar
from engine.grammar.compiler import schema_in_lark
from engine.grammar.lark import SpecialId, literal, one_up_to_mark, separated
from engine.grammar.schema_keywords import OF_NUMBERS, OF_TEXTS
from engine.grammar.texts import ANY_TEXT, count_in, text_terminal

_HELD = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": OF_TEXTS,
    "number": OF_NUMBERS,
}
"""Keywords that are enforced, by the types of values that they constrain."""
_ANY_KEY = r'/[^\s<>{}\[\],:"]([^<>{}\[\],:"\n]{0,62}[^\s<>{}\[\],:"])?/'


def argument_rules(name: str, schema: Schema, special: SpecialId) -> list[str]:
    """Return rules for the text between the braces of a call; the first is called `name`.

    Raises InvalidGrammar.
    """
    rules = _Rules(name, schema, special)
    rules.members(name, schema)
    return rules.lines


class _Rules:
    """The rules for one function's arguments."""

    def __init__(self, name: str, root: Schema, special: SpecialId) -> None:
        self._name, self._root, self._special = name, root, special
        self._shared: dict[str, str] = {}
        """The rules of referenced schemas, by reference; a schema may refer to itself. "" is any value."""
        self.lines: list[str] = []

    def members(self, rule: str, schema: Schema) -> None:
        """Add a rule for the text between the braces of an object."""
        check_held(schema, _HELD["object"], ("object",))
        members, required = members_of(schema), schema.get("required") or []
        if members is None:
            key, others = f"({_ANY_KEY} | {self._text(f'{rule}_key')})", schema.get("additionalProperties", True)
            self.lines.append(f'{rule}: ({rule}_member ("," {rule}_member)*)?')
            self.lines.append(f'{rule}_member: {key} ":" {self._value(f"{rule}_any", others)}')
            return
        parts = []
        for number, (key, child) in enumerate(members.items()):
            written = self._literal(key_written(key), key)
            parts.append((f'{written} ":" {self._value(f"{rule}_{number}", child)}', key in required))
        self.lines += separated(rule, parts, ",")

    def _value(self, rule: str, schema: Schema | bool) -> str:
        """Return the rule for a value of a schema: it is called `rule` and added, if there is none yet."""
        if schema is False:
            raise InvalidGrammar("a value whose schema is false cannot be written")
        if schema is True or not schema:
            return self._of_shared("", {"type": sorted(ANYTHING)})
        if (target := target_of(schema, self._root)) is not None:
            return self._of_shared(schema["$ref"], target)
        if (choices := choices_of(schema, self._root)) is not None:
            options = [self._literal(value_written(one), one if isinstance(one, str) else "") for one in choices]
        elif (alternatives := alternatives_of(schema, self._root)) is not None:
            options = [self._value(f"{rule}_{number}", one) for number, one in enumerate(alternatives)]
        else:
            allowed = sorted(kinds(schema, self._root))
            check_held(schema, set[str]().union(*(_HELD.get(kind, ()) for kind in allowed)), allowed)
            options = [self._of_kind(f"{rule}_{kind}", kind, schema) for kind in allowed]
        if not options:
            raise InvalidGrammar("no value matches, because all alternatives are false")
        self.lines.append(f"{rule}: {' | '.join(options)}")
        return rule

    def _of_shared(self, key: str, schema: Schema | bool) -> str:
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
            return self._text(rule, text_terminal(schema))
        if kind == "number":
            told = schema.get("type")
            given = told if isinstance(told, list) else [told]
            number = "integer" if "integer" in given and "number" not in given else "number"
            bounds = {keyword: schema[keyword] for keyword in OF_NUMBERS if keyword in schema}
            self.lines.append(f"{rule}: {schema_in_lark({'type': number, **bounds})}")
            return rule
        return '"null"' if kind == "null" else '("true" | "false")'

    def _list(self, rule: str, schema: Schema) -> str:
        least, most = count_in(schema, "minItems") or 0, count_in(schema, "maxItems")
        items = schema.get("items", True)
        if isinstance(items, list):
            raise InvalidGrammar("items is not supported as a list of schemas in this model's syntax of arguments")
        if most is not None and least > most:
            raise InvalidGrammar(f"no list has at least {least} items (minItems) and at most {most} (maxItems)")
        if most == 0 or (items is False and not least):
            return '"[" "]"'
        item = self._value(f"{rule}_item", items)
        count = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        several = item if most == 1 else f'{item} ("," {item}){count}'
        return f'"[" {several} "]"' if least else f'"[" ({several})? "]"'

    def _text(self, rule: str, text: str = ANY_TEXT) -> str:
        """Return an expression for a text, a terminal, in its marks; rules are added for it."""
        self.lines += one_up_to_mark(f"{rule}_text", [text], QUOTE, self._special)
        return f"{self._literal(QUOTE)} {rule}_text"

    def _literal(self, text: str, inside: str = "") -> str:
        """Return an expression for this text. Raises InvalidGrammar if `inside` of it is a mark of texts."""
        if QUOTE in inside:
            raise InvalidGrammar(f"{inside!r} cannot be written in this model's format of calls")
        return literal(text, MARKS, self._special)
