"""Rules of a grammar for arguments one by one, each with its key, in marks (`deployments/api/tools/keyed.py`)."""

from __future__ import annotations

from typing import Any

from deployments.api.tools.keyed import NOT_IN_KEYS, KeyedMarks, before_value
from deployments.api.tools.named import TEXT_OR_NULL, arguments_of, kinds
from engine.errors import InvalidGrammar
from engine.grammar.compiler import schema_in_lark
from engine.grammar.lark import SpecialId, literal, up_to_mark


def argument_rules(marks: KeyedMarks, name: str, schema: dict[str, Any], special: SpecialId) -> list[str]:
    """Return rules of a grammar for arguments; the first is called `name`. Raises InvalidGrammar."""
    write = _Writer(marks, special)
    arguments = arguments_of(schema)
    if arguments is None:
        begin, _, end = before_value(marks, "\0").partition("\0")
        return [
            f'{name}: ({write.mark(begin)} /[^<>"\\n]+/ {write.mark(end)} {name}_any)*',
            *write.text(f"{name}_any"),
        ]
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

    def text(self, rule: str, count: str = "*") -> list[str]:
        """Return rules for a text, and the mark that ends it."""
        marks = self._marks
        text = up_to_mark(f"{rule}_text", marks.ends_value, self._special, count=count, before=marks.around_value)
        return [f"{rule}: {rule}_text {self.mark(marks.layout)}", text]

    def value(self, rule: str, schema: dict[str, Any]) -> list[str]:
        """Return rules for a value, and the mark that ends it."""
        allowed = kinds(schema, schema)
        end = self.mark(f"{self._marks.around_value}{self._marks.ends_value}{self._marks.layout}")
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if not allowed <= TEXT_OR_NULL:
            return [f"{rule}: {rule}_json {end}", f"{rule}_json: {schema_in_lark(schema)}"]
        if isinstance(choices, list):
            texts = ("null" if choice is None else str(choice) for choice in choices)
            return [f"{rule}: ({' | '.join(self.mark(text) or chr(34) * 2 for text in texts)}) {end}"]
        if allowed == {"null"}:
            return [f'{rule}: "null" {end}']
        if "pattern" in schema:
            raise InvalidGrammar("pattern is not supported, because this model writes texts without quotes")
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        return self.text(rule, "*" if not least and most == "" else f"{{{least},{most}}}")
