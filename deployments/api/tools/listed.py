"""Parses calls as a list of objects after a mark: MARK[{"name": NAME, "arguments": {...}}, ...].

Granite 3  <|tool_call|>[{"name": NAME, "arguments": {...}}]
Phi-4      functools[{"name": NAME, "arguments": {...}}]
Mistral    [TOOL_CALLS][{"name": NAME, "arguments": {...}}]
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deployments.api.tools.marked import parse_marked
from deployments.api.tools.named import Functions
from deployments.api.tools.scanner import Malformed, Scanner, parse_call
from deployments.api.tools.segments import Parser


def parse_listed(openings: Sequence[str], closings: Sequence[str], functions: Functions) -> Parser[None]:
    """Parse text, and lists of calls of `functions` after `openings`."""

    def calls(at: Scanner, opening: str) -> Parser[bool]:
        yield from at.spaces()
        return (yield from list_of_calls(at, functions))

    return parse_marked(openings, closings, calls)


def list_of_calls(at: Scanner, names: Collection[str]) -> Parser[bool]:
    """Parse a list of calls, and return whether it is complete.

    Raises `Malformed` if the first is none; a later one that is none ends the list.
    """
    char = yield from at.token("[")
    has_called = False
    while char == "{":
        try:
            is_complete = yield from parse_call(at, names, ("arguments", "parameters"))
        except Malformed:
            break
        has_called = True
        char = yield from at.spaces()
        if not is_complete or char not in (",", "]"):
            break
        at.take()
        if char == "]":
            at.drop()
            return True
        char = yield from at.spaces()
    if not has_called:
        raise Malformed
    return False
