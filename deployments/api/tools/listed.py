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

    def calls(at: Scanner, opening: str) -> Parser[None]:
        yield from at.spaces()
        yield from list_of_calls(at, functions)

    return parse_marked(openings, closings, calls)


def list_of_calls(at: Scanner, names: Collection[str]) -> Parser[None]:
    """Parse a list of calls, up to its end or to what is no call.

    Raises `Malformed` if the first is none, with all that was taken still held.
    """
    yield from at.token("[")
    yield from parse_call(at, names)
    while (char := (yield from at.spaces())) == ",":
        at.take()
        if (char := (yield from at.spaces())) == "]":
            break
        try:
            yield from parse_call(at, names)
        except Malformed:
            return
    if char == "]":
        at.take()
        at.drop()
