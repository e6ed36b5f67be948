"""Reads grammars in llguidance's dialect of Lark: the JSON schemas in them, and which of their rules cannot end.

    start: "yes" bad        bad: /[^\\s\\S]/       after "yes", nothing can follow
    start: "a" start                             each start needs another

llguidance would follow such a rule until nothing is allowed. If the syntax is not known here, the grammar is not
checked, so no grammar is rejected that llguidance can follow.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from engine.base.errors import InvalidGrammar
from engine.grammar.languages import is_empty
from engine.grammar.least_set import least_set

_TOKEN = re.compile(
    r"""(?P<head>^[ \t]*[!?]*_*[A-Za-z][\w-]*
        (?P<attributes>\[(?:"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|[^\]"/\n])*\])?[ \t]*:(?!:))
    |(?P<blank>\s+|(?://|\#)[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<special><[^<>\s]+>|@[\w-]+)
    |(?P<json>%(?:json|regex|llguidance)\b)
    |(?P<statement>%[^\n]*)
    |(?P<alias>->[ \t]*[\w-]+)
    |(?P<times>\{[^{}\n]*\}|~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)
    |(?P<range>\.\.)
    |(?P<name>[!?]*_*[A-Za-z][\w-]*)
    |(?P<sign>[&~:|()\[\]?*+])""",
    re.VERBOSE | re.MULTILINE,
)
_MAY_BE_NONE = re.compile(r"[?*]|\{\s*0?\s*,|~\s*0")
_CUTS = re.compile(r"\b(stop|suffix|max_tokens)\b")
_SOME = '"…"'
"""Stands for any text that can be written."""
_LONGEST_QUOTE = 60
Rules = dict[str, list[list[str]]]
"""The alternatives of each rule: sequences of rules, terminals and regular expressions."""


class Token(NamedTuple):
    """A part of a grammar's source. Kinds are the names of groups in `_TOKEN`."""

    kind: str
    text: str
    start: int
    end: int
    value: Any = None
    """For `json`: the value that follows."""
    is_cut: bool = False
    """For `head`: whether the rule ends by other means than its alternatives."""


def with_schemas(source: str, rewrite: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """Return a grammar whose JSON schemas are rewritten."""
    parts, at = [], 0
    for token in tokens_of(source) or ():
        if token.text == "%json" and isinstance(token.value, dict):
            parts += [source[at : token.start], "%json ", json.dumps(rewrite(token.value))]
            at = token.end
    return "".join([*parts, source[at:]])


def check_rules_end(source: str) -> None:
    """Raise InvalidGrammar if an answer could begin a rule that it cannot end."""
    try:
        rules, terminals = rules_of(source)
    except NotKnown:
        return
    leaves = {part for sequences in rules.values() for one in sequences for part in one if part not in rules}
    empty = set(_empty(sorted(leaves - {_SOME}), terminals))
    ends = leaves - empty
    ends |= least_set(
        rules, lambda rule, has: any(all(part in ends or has(part) for part in one) for one in rules[rule])
    )
    begins = leaves - empty
    nothing = least_set(rules, lambda rule, has: any(all(map(has, one)) for one in rules[rule]))
    begins |= least_set(
        rules,
        lambda rule, has: any(
            _begins(one, nothing, lambda part: part in begins or has(part)) for one in rules[rule]
        ),
    )
    stuck = [
        next(part for part in one if part not in ends)
        for one in _reachable(rules)
        if not ends.issuperset(one) and _begins(_until(one, ends), nothing, begins.__contains__)
    ]
    if stuck:
        raise InvalidGrammar(_complaint(min(stuck, key=lambda part: (part in rules, " " in part)), empty))


def _until(sequence: Sequence[str], ends: set[str]) -> Sequence[str]:
    """Return the part of a sequence up to and including the first item that cannot end."""
    return sequence[: next(at for at, part in enumerate(sequence) if part not in ends) + 1]


def _begins(sequence: Sequence[str], nothing: set[str], begins: Callable[[str], bool]) -> bool:
    """Whether a sequence can begin with some text; the items in `nothing` may be empty."""
    for part in sequence:
        if begins(part):
            return True
        if part not in nothing:
            return False
    return False


def _reachable(rules: Rules) -> Iterator[list[str]]:
    """Yield the sequences that an answer may contain."""
    todo = deque(["start"])
    seen = set(todo)
    while todo:
        for sequence in rules.get(todo.popleft(), ()):
            yield sequence
            fresh = [part for part in sequence if part in rules and part not in seen]
            seen.update(fresh)
            todo += fresh


def _empty(leaves: Sequence[str], terminals: str) -> Iterator[str]:
    """Yield the leaves that match no text, by bisection: a sequence matches none if one of its leaves does not."""
    if leaves and is_empty(" ".join(leaves), terminals):
        if len(leaves) == 1:
            yield leaves[0]
        else:
            half = len(leaves) // 2
            yield from _empty(leaves[:half], terminals)
            yield from _empty(leaves[half:], terminals)


def _complaint(part: str, empty: set[str]) -> str:
    if part in empty:
        return f"{part[:_LONGEST_QUOTE]} matches no text, so an answer could not continue there"
    name = part.partition(" ")[0]
    return (
        f'rule "{name[:_LONGEST_QUOTE]}" can never end, because each of its alternatives needs a rule that cannot '
        "end, or an expression that matches no text; give it an alternative that ends"
    )


# --- reading -----------------------------------------------------------------------------------------------


class NotKnown(Exception):
    """The grammar has syntax that is not known here."""


def rules_of(source: str) -> tuple[Rules, str]:
    """Return the rules of a grammar, and the definitions of its terminals. Raises NotKnown."""
    try:
        return _Reader(source).read()
    except (IndexError, RecursionError):
        raise NotKnown from None


class _Reader:
    """Reads the rules of one grammar. A group or an optional part becomes a rule whose name has a blank."""

    def __init__(self, source: str) -> None:
        tokens = tokens_of(source)
        if tokens is None:
            raise NotKnown
        self._source = source
        self._tokens = deque(token for token in tokens if token.kind not in ("blank", "alias"))
        self._rules: Rules = {}
        self._owner = ""

    def read(self) -> tuple[Rules, str]:
        """Return the rules, and the definitions of terminals. Raises NotKnown, IndexError, RecursionError."""
        terminals = []
        while self._tokens:
            head = self._tokens.popleft()
            name = head.text.strip().lstrip("!?").rstrip(": \t").partition("[")[0]
            if head.kind == "head" and name.lstrip("_")[0].islower():
                self._owner = name
                found = self._alternatives()
                self._rules[name] = [[_SOME]] if head.is_cut else found
            elif head.kind == "head":
                while self._next not in ("head", "statement", ""):
                    self._tokens.popleft()
                end = self._tokens[0].start if self._tokens else len(self._source)
                terminals.append(self._source[head.start : end])
            elif head.kind == "statement":
                terminals.append(head.text)
            elif head.text != "%llguidance":
                raise NotKnown
        return self._rules, "\n".join(terminals)

    @property
    def _next(self) -> str:
        """The kind of the next token, or its text if it is a sign; "" at the end."""
        if not self._tokens:
            return ""
        token = self._tokens[0]
        return token.text if token.kind == "sign" else token.kind

    def _alternatives(self) -> list[list[str]]:
        found: list[list[str]] = [[]]
        while self._next not in ("head", "statement", ")", "]", ""):
            if self._next == "|":
                self._tokens.popleft()
                found.append([])
            else:
                found[-1].append(self._part())
        return found

    def _part(self) -> str:
        part = self._atom()
        if self._next == "range":
            self._tokens.popleft()
            self._atom()
        while self._next in ("?", "*", "+", "times"):
            part = self._repeated(part, self._tokens.popleft().text)
        return part

    def _repeated(self, part: str, times: str) -> str:
        """Return a rule for a repeated part, without its upper bound."""
        name = self._rule([[part]])
        if times != "?":
            self._rules[name].append([part, name])
        if _MAY_BE_NONE.match(times):
            self._rules[name].append([])
        return name

    def _atom(self) -> str:
        token = self._tokens.popleft()
        if token.text in ("(", "["):
            inside = self._alternatives()
            if self._tokens.popleft().text != {"(": ")", "[": "]"}[token.text]:
                raise NotKnown
            return self._rule(inside if token.text == "(" else [*inside, []])
        if token.kind == "name":
            return token.text.lstrip("!?")
        if token.kind == "regex":
            return token.text
        if token.kind in ("special", "json", "text"):
            return self._rule([[]]) if token.text in ('""', '""i') else _SOME
        raise NotKnown

    def _rule(self, alternatives: list[list[str]]) -> str:
        name = f"{self._owner} {len(self._rules)}"
        self._rules[name] = alternatives
        return name


def tokens_of(source: str) -> list[Token] | None:
    """Return all of a grammar's tokens; None if one is not known."""
    found, at = list[Token](), 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            return None
        kind, end, value = match.lastgroup or "", match.end(), None
        if kind == "json":
            try:
                blank = re.compile(r"\s*").match(source, end)
                value, end = json.JSONDecoder().raw_decode(source, blank.end() if blank else end)
            except (ValueError, RecursionError):
                return None
        is_cut = match["attributes"] is not None and _CUTS.search(match["attributes"]) is not None
        found.append(Token(kind, match[0], at, end, value, is_cut))
        at = end
    return found
