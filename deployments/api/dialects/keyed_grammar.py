"""Rules of a grammar for arguments one by one, each with its key, in marks (`dialects/keyed.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from deployments.api.dialects.keyed import NOT_IN_KEYS, KeyedMarks, before_value
from deployments.api.dialects.named import ANYTHING, TEXT_OR_NULL, kinds
from deployments.api.dialects.written_values import (
    Schema,
    alternatives_of,
    arguments_of,
    check_held,
    choices_of,
    target_of,
    values_of,
)
from engine.base.errors import InvalidGrammar
from engine.grammar.compiler import schema_in_lark
from engine.grammar.lark import SpecialId, literal, one_up_to_mark
from engine.grammar.schema_keywords import OF_TEXTS, binding
from engine.grammar.texts import ANY_TEXT, text_terminal


def argument_rules(marks: KeyedMarks, name: str, schema: dict[str, Any], special: SpecialId) -> list[str]:
    """Return rules of a grammar for arguments; the first is called `name`. Raises InvalidGrammar."""
    write = _Writer(marks, special)
    arguments = arguments_of(schema)
    if arguments is None:
        begin, _, end = before_value(marks, "\0").partition("\0")
        member = f'{write.mark(begin)} /[^<>"\\n]+/ {write.mark(end)}'
        return [f"{name}: ({member} {name}_any)*", *write.any_value(f"{name}_any", values_of(schema))]
    parts, rules = [], []
    for number, argument in enumerate(arguments):
        if NOT_IN_KEYS & set(argument.name) or not argument.name:
            raise InvalidGrammar(
                f"the argument {argument.name!r} cannot be written in this model's format of calls"
            )
        rule = f"{name}_{number}"
        parts.append(rule if argument.is_required else f"{rule}?")
        head = write.mark(before_value(marks, argument.name))
        rules += [f"{rule}: {head} {rule}_value", *write.value(f"{rule}_value", argument.schema)]
    return [f"{name}: {' '.join(parts) or chr(34) * 2}", *rules]


class _Writer:
    """Writes rules for values and the marks around them."""

    def __init__(self, marks: KeyedMarks, special: SpecialId) -> None:
        self._marks, self._special = marks, special

    def mark(self, text: str) -> str:
        """Write a text with marks."""
        return literal(text, self._marks.all, self._special)

    def value(self, rule: str, schema: Schema) -> list[str]:
        """Return rules for a value, and the mark that ends it. Raises InvalidGrammar."""
        if not kinds(schema, schema) <= TEXT_OR_NULL:
            return self._json(rule, schema)
        choices, texts = list[str](), list[str]()
        for choice, text in _texts(schema, schema):
            (choices if text is None else texts).append(choice if text is None else text)
        if texts:
            return self._text(rule, [*texts, *(json.dumps(choice, ensure_ascii=False) for choice in choices)])
        if not choices:
            raise InvalidGrammar("no value has the type that its schema asks for")
        options = (self.mark(choice) or chr(34) * 2 for choice in dict.fromkeys(choices))
        return [f"{rule}: ({' | '.join(options)}) {self._end}"]

    def any_value(self, rule: str, schema: Schema) -> list[str]:
        """Return rules for the value of an argument that the schema does not name, and the mark that ends it.

        Such a value is read as JSON, or as a text if it is no JSON.
        """
        is_bound = "type" in schema or binding(schema, ANYTHING)
        return self._json(rule, schema) if is_bound else self._text(rule, [ANY_TEXT])

    @property
    def _end(self) -> str:
        marks = self._marks
        return self.mark(f"{marks.around_value}{marks.ends_value}{marks.layout}")

    def _json(self, rule: str, schema: Schema) -> list[str]:
        return [f"{rule}: {rule}_json {self._end}", f"{rule}_json: {schema_in_lark(schema)}"]

    def _text(self, rule: str, texts: list[str]) -> list[str]:
        marks = self._marks
        text = one_up_to_mark(f"{rule}_text", texts, marks.ends_value, self._special, before=marks.around_value)
        return [f"{rule}: {rule}_text {self.mark(marks.layout)}", *text]


def _texts(schema: Schema | bool, root: Schema) -> Iterator[tuple[str, str | None]]:
    """Yield the forms of a text, or null, that a schema allows if it allows no other types: a choice, or the
    expression of a terminal. Raises InvalidGrammar.
    """
    if isinstance(schema, bool):
        return
    if (target := target_of(schema, root)) is not None:
        yield from _texts(target, root)
    elif (choices := choices_of(schema, root)) is not None:
        yield from (("null" if choice is None else choice, None) for choice in choices)
    elif (alternatives := alternatives_of(schema, root)) is not None:
        for one in alternatives:
            yield from _texts(one, root)
    else:
        allowed = kinds(schema, root)
        check_held(schema, OF_TEXTS, allowed)
        if "null" in allowed:
            yield "null", None
        if "string" in allowed:
            yield "", text_terminal(schema)
