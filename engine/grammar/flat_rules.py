r"""Rewrites rules that join two texts of their own, which can be parsed in many ways, as lists that match the
same.

    s: s s | s "," s | "a" | "b"    ─▶    s: s_item ((",")? s_item)*       s_item: "a" | "b"

By the former, a text of n items has exponentially many parses, and following them takes time in O(n^3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.grammar.rules import Token, tokens_of


class _Rule(NamedTuple):
    """A rule: its place in the source and its alternatives."""

    name: str
    start: int
    end: int
    alternatives: list[list[Token]]


def with_flat_rules(source: str) -> str:
    """Return a grammar in Lark's syntax with such rules rewritten; unchanged where its syntax is not known."""
    parts, at = list[str](), 0
    for rule in _rules(tokens_of(source) or ()):
        flat = _flat(source, rule)
        if flat is not None:
            parts += [source[at : rule.start], flat]
            at = rule.end
    return "".join([*parts, source[at:]])


def _rules(tokens: Sequence[Token]) -> list[_Rule]:
    """Return the rules without attributes and without names of alternatives."""
    rules, depth = list[_Rule](), 0
    is_plain = False
    for token in tokens:
        if token.kind in ("head", "statement"):
            name = token.text.strip().rstrip(": \t")
            is_plain = token.kind == "head" and name.isidentifier() and name.lstrip("_")[:1].islower()
            if is_plain:
                rules.append(_Rule(name, token.start, token.end, [[]]))
        elif is_plain and token.kind == "alias":
            is_plain = False
            rules.pop()
        elif is_plain and token.kind != "blank":
            rule = rules[-1]
            depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
            if token.text == "|" and depth == 0:
                rule.alternatives.append([])
            else:
                rule.alternatives[-1].append(token)
            rules[-1] = rule._replace(end=token.end)
    return rules


def _flat(source: str, rule: _Rule) -> str | None:
    """Return the rules that replace one; None if it does not join its own texts, or does only that."""
    joins = [one for one in rule.alternatives if _joins(rule.name, one)]
    items = [one for one in rule.alternatives if one not in joins]
    item = f"{rule.name}_item"
    if not joins or not items or item in source:
        return None
    between = [f"({_text(source, one[1:-1])})" for one in joins if len(one) > 2]
    has_none = "?" if len(between) < len(joins) else ""
    separator = f"({' | '.join(between)}){has_none} " if between else ""
    listed = f"{rule.name}: {item} ({separator}{item})*"
    return f"{listed}\n{item}: {' | '.join(_text(source, one) for one in items)}"


def _joins(name: str, alternative: Sequence[Token]) -> bool:
    """Whether an alternative begins and ends with its own rule."""
    if len(alternative) < 2 or not all(alternative[at].text == name for at in (0, -1)):
        return False
    return alternative[1].kind not in ("times", "range") and alternative[1].text not in ("?", "*", "+")


def _text(source: str, tokens: Sequence[Token]) -> str:
    """Return tokens as the source writes them, on one line."""
    return " ".join(source[token.start : token.end] for token in tokens) or '""'
