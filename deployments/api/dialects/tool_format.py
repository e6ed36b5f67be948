"""Describes a format of calls: its marks, its parser, how it is recognized, written and enforced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.api.dialects.named import Functions
from deployments.api.dialects.segments import Parser
from engine.grammar.lark import SpecialId

NAME, NUMBER = "NAME", "NUMBER"
ArgumentRules = Callable[[str, dict[str, Any], SpecialId], list[str]]


def _plain(arguments: str) -> str:
    return arguments


class CreateParser(Protocol):
    """Creates the parser of an answer."""

    def __call__(self, functions: Functions, until: str = "") -> Parser[None]:
        """Parse text, and calls of `functions`; and reasoning, if given the mark that closes it."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format: OPENS call SEPARATOR call CLOSES. Each call is HEAD arguments TAIL; HEAD has its name."""

    parser: CreateParser
    is_taught: Callable[[str], bool]
    """Whether a chat template, given as text, shows this format to models."""
    head: str
    """Text before the arguments; NAME stands for the function's name, and NUMBER for the call's number, from 0."""
    tail: str
    opens: str = ""
    closes: str = ""
    separator: str = "\n"
    marks: tuple[str, ...] = ()
    """Marks that separate calls from text; if they are special tokens, they must stay in the parsed text."""
    begins: str = ""
    """The mark with which calls begin after text; "" if they can only begin an answer."""
    initial: str = "{"
    """The character with which an answer with calls begins, where there is no such mark."""
    key: str | None = None
    """The member with the arguments, where a whole call is a JSON object and nothing else."""
    has_short_ids: bool = False
    """Whether the templates take only ids of calls that have nine letters and digits."""
    rules: ArgumentRules | None = None
    """Makes the grammar's rules for arguments, given the first rule's name, the schema and the ids of special
    tokens. None: they are JSON."""
    write: Callable[[str], str] = _plain
    """Writes arguments, given as JSON."""

    def spell(self, name: str, arguments: str, number: int = 0) -> str:
        """Write a call with its arguments, given as JSON, and its number among those of the answer."""
        return f"{str(number).join(self.heads(name))}{self.write(arguments)}{self.tail}"

    def spell_all(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write all calls of an answer, each a name and its arguments."""
        spelled = (self.spell(*call, number) for number, call in enumerate(calls))
        return self.opens + self.separator.join(spelled) + self.closes

    def heads(self, name: str) -> list[str]:
        """Write the text before the arguments of a call, as the parts around the call's number."""
        return [part.replace(NAME, name) for part in self.head.split(NUMBER)]
