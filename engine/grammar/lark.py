"""Texts and marks in the Lark syntax of grammars. No text matches a special token: its id refers to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence

from engine.grammar.texts import ANY_TEXT

SpecialId = Callable[[str], int | None]
"""Returns the id of the special token with a text; None if there is none."""


def reference(mark: str, special: SpecialId) -> str | None:
    """Return a grammar's reference to a special token, by its id; None if the mark is text."""
    known = special(mark)
    return None if known is None else f"<[{known}]>"


def literal(text: str, marks: Iterable[str], special: SpecialId) -> str:
    """Return `text`, with references to the special tokens among `marks`; "" if it is empty."""
    for mark in marks:
        if mark in text and (known := reference(mark, special)):
            before, _, after = text.partition(mark)
            parts = (literal(before, marks, special), known, literal(after, marks, special))
            return " ".join(part for part in parts if part)
    return json.dumps(text, ensure_ascii=False) if text else ""


def up_to_mark(rule: str, mark: str, special: SpecialId, *, before: str = "") -> str:
    """Return a rule for the shortest text up to and including `mark`, with `before` optionally before the mark."""
    text = f"(?s:.*){json.dumps(before)[1:-1]}?" if before else "(?s:.*)"
    if known := reference(mark, special):
        return f"{rule}: /{text}/ {known}"
    return f"{rule}[lazy]: /{text}{re.escape(mark).replace('/', chr(92) + '/')}/"


def one_up_to_mark(
    rule: str, texts: Sequence[str], mark: str, special: SpecialId, *, before: str = ""
) -> list[str]:
    """Return rules for one of `texts`, which are expressions for terminals, and `mark`; the first rule is called
    `rule`. One `before` may come before the mark, and must if the text itself ends with one.
    """
    if ANY_TEXT in texts:
        return [up_to_mark(rule, mark, special, before=before)]
    text, written = f"{rule}_one".upper(), " | ".join(dict.fromkeys(texts))
    terminals = [f"{text}: {written}"]
    if before:
        text, one, end = f"{rule}_whole".upper(), text, json.dumps(before)[1:-1]
        terminals.append(f"{text}: {one} /{end}/ | {one} & ~/(?s:.*){end}/")
    if known := reference(mark, special):
        return [f"{rule}: {text} {known}", *terminals]
    return [f"{rule}[lazy]: {text} {json.dumps(mark, ensure_ascii=False)}", *terminals]


def separated(name: str, parts: Sequence[tuple[str, bool]], separator: str) -> list[str]:
    """Return rules for `parts` in their order, with a separator between two; the first is called `name`.

    Each part is an expression, and whether it is required. Rule NAME_first_I has the parts from I on if none is
    written yet, and NAME_more_I if one is.
    """
    rules = [f"{name}: {name}_first_0", f'{name}_first_{len(parts)}: ""', f'{name}_more_{len(parts)}: ""']
    for number, (part, is_required) in enumerate(parts):
        one, after, more = f"{name}_part_{number}", number + 1, f"{json.dumps(separator)} {name}_part_{number}"
        rules.append(f"{one}: {part}")
        skipped = "" if is_required else f" | {name}_first_{after}"
        rules.append(f"{name}_first_{number}: {one} {name}_more_{after}{skipped}")
        rules.append(f"{name}_more_{number}: {more if is_required else f'({more})?'} {name}_more_{after}")
    return rules
