r"""Translates grammars from Lark's syntax to xgrammar's, where they mean the same in both.

    start: /[a-z ]/ start | "end"      start ::= [a-z ] start | "end"

llguidance reads an answer terminal by terminal, each time the longest text that one matches. xgrammar reads
characters. So both agree if no terminal's text can be the beginning of another's. A grammar in GBNF has no
terminals, so xgrammar is always right for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from engine.grammar.least_set import least_set
from engine.grammar.rules import NotKnown, Rules, Token, rules_of, tokens_of

ROOT = "raydix-root"
"""A rule that no other refers to: if another refers to the root, xgrammar forbids tokens that span its end."""
_CLASS = re.compile(r"/\[(\^?)((?:\\.|[^\]\[\\\n])+)\]/", re.DOTALL)
_CHAR = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})|\\[^0-9a-zA-Z]|\\[nrt]|[^\\]", re.DOTALL
)
_SET_OPERATION = re.compile(r"&&|--|~~")
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_COUNTS = re.compile(r"\{\d+(,\d*)?\}")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_SURROGATES = 0xD800, 0xDFFF
_NUM_CHARS = 0x110000


Ranges = Sequence[tuple[int, int]]
"""Characters: the first and the last of each range."""


def as_ebnf(source: str, *, has_terminals: bool) -> str | None:
    """Return a grammar in xgrammar's syntax, whose root is the rule `ROOT`; None if it may not match exactly the
    same texts. `has_terminals`: whether the terminals of the source are read one by one.
    """
    tokens = [token for token in tokens_of(source) or () if token.kind != "blank"]
    if tokens and tokens[0].text == "%llguidance" and tokens[0].value == {}:
        del tokens[0]
    try:
        written = [*_with_empty_alternatives(tokens)]
        if not tokens or _derives_itself(rules_of(source)[0]):
            return None
        if has_terminals:
            _check_no_terminal_begins_another(tokens)
    except (_Differs, NotKnown):
        return None
    return None if ROOT in written else " ".join([f"{ROOT} ::= start", *written])


class _Differs(Exception):
    """The grammar has syntax that xgrammar does not know, or interprets differently."""


def _with_empty_alternatives(tokens: Sequence[Token]) -> Iterator[str]:
    """Yield the parts of the translation, with "" for each empty alternative."""
    was_empty = False
    for token in tokens:
        ends = token.kind == "head" or token.text in ("|", ")")
        if was_empty and ends:
            yield '""'
        yield _written(token)
        was_empty = token.kind == "head" or token.text in ("|", "(")
    if was_empty:
        yield '""'


def _written(token: Token) -> str:
    text = token.text
    match token.kind:
        case "head":
            name = text.strip().rstrip(": \t")
            if _NAME.fullmatch(name):
                return f"\n{name} ::="
        case "name" if _NAME.fullmatch(text):
            return text
        case "text":
            return f'"{"".join(map(_escaped, map(ord, _plain(text))))}"'
        case "regex":
            return f"[{''.join('-'.join(map(_escaped, both)) for both in _class(text))}]"
        case "times" if _COUNTS.fullmatch(text):
            return text
        case "sign" if text in "|()?*+":
            return text
    raise _Differs


def _plain(text: str) -> str:
    """Return the content of a quoted text. Raises _Differs if it has other escapes, or ignores case."""
    try:
        return str(json.loads(text))
    except ValueError:
        raise _Differs from None


def _class(regex: str) -> Ranges:
    """Return the characters that a regular expression matches. Raises _Differs if it matches longer texts."""
    if regex == "/./":
        return _others([(ord("\n"), ord("\n"))])
    found = _CLASS.fullmatch(regex)
    if found is None or _SET_OPERATION.search(found[2]):
        raise _Differs
    chars = _CHAR.findall(found[2])
    if "".join(chars) != found[2]:
        raise _Differs
    ranges = list[tuple[int, int]]()
    while chars:
        first = last = _code(chars.pop(0))
        if len(chars) > 1 and chars[0] == "-":
            last = _code(chars[1])
            del chars[:2]
        ranges.append((first, last))
    matched = _others(ranges) if found[1] else _others(_others(ranges))
    if not matched:
        raise _Differs
    return matched


def _others(ranges: Ranges) -> Ranges:
    """Return all other characters, without surrogates, which xgrammar does not know."""
    others, begin = list[tuple[int, int]](), 0
    for first, last in sorted([*ranges, _SURROGATES, (_NUM_CHARS, _NUM_CHARS)]):
        if begin < first:
            others.append((begin, first - 1))
        begin = max(begin, last + 1)
    return others


def _code(written: str) -> int:
    """Return the code of a character that is written in a class."""
    if not written.startswith("\\"):
        return ord(written)
    if len(written) == 2:
        return ord(_CONTROLS.get(written[1], written[1]))
    return int(written[2:], 16)


def _escaped(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\U{code:08x}"


def _check_no_terminal_begins_another(tokens: Sequence[Token]) -> None:
    """Raise _Differs if a terminal's text is, or may be, the beginning of another's."""
    is_terminal = False
    for token in tokens:
        if token.kind == "head":
            is_terminal = token.text.strip().lstrip("_")[0].isupper()
        elif is_terminal and token.kind not in ("text", "regex") and token.text != "|":
            raise _Differs  # a terminal of several parts
    texts = {_plain(token.text) for token in tokens if token.kind == "text"}
    classes = [both for token in tokens if token.kind == "regex" for both in _class(token.text)]
    for text in texts:
        beginnings = {text[:count] for count in range(1, len(text))}
        if texts & beginnings or (beginnings and any(first <= ord(text[0]) <= last for first, last in classes)):
            raise _Differs


def _derives_itself(rules: Rules) -> bool:
    """Whether some rule can derive exactly itself. xgrammar then misses answers, or ends the process."""
    empty = least_set(rules, lambda rule, is_in: any(all(map(is_in, one)) for one in rules[rule]))
    inner = {
        rule: {part for one in found for at, part in enumerate(one) if empty.issuperset(one[:at] + one[at + 1 :])}
        for rule, found in rules.items()
    }
    ends = least_set(rules, lambda rule, is_in: all(part not in rules or is_in(part) for part in inner[rule]))
    return len(ends) < len(rules)
