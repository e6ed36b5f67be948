"""Parses calls as Mistral's models write them, after [TOOL_CALLS]: as a list of objects, or with the name before.

[TOOL_CALLS][{"name": NAME, "arguments": {...}}, ...]
[TOOL_CALLS]NAME[ARGS]{...}[TOOL_CALLS]NAME{...}
"""

from __future__ import annotations

from deployments.api.tools.listed import list_of_calls
from deployments.api.tools.marked import parse_marked
from deployments.api.tools.named import Functions
from deployments.api.tools.scanner import Malformed, Scanner, parse_arguments
from deployments.api.tools.segments import Parser

MARK, ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKS = (MARK, ARGUMENTS, _ID)


def parse_mistral(functions: Functions) -> Parser[None]:
    """Parse text, and calls of `functions`."""

    def calls(at: Scanner, opening: str) -> Parser[None]:
        char = yield from at.spaces()
        yield from (list_of_calls(at, functions) if char == "[" else _named(at, functions))

    return parse_marked((MARK,), (), calls)


def _named(at: Scanner, functions: Functions) -> Parser[None]:
    """Parse a name, perhaps an id, and arguments. Raises `Malformed` if it is no call."""
    name = yield from _until(at, "[{ \n")
    if name not in functions:
        raise Malformed
    found = yield from at.mark(_ID, ARGUMENTS)
    if found == _ID:
        yield from _until(at, "[{ \n")
        yield from at.mark(ARGUMENTS)
    yield from parse_arguments(at, name)


def _until(at: Scanner, ends: str) -> Parser[str]:
    """Take a word. Raises `Malformed` at the end of the text."""
    word = ""
    while (char := (yield from at.look())) not in ends:
        at.take()
        word += char
    if not char:
        raise Malformed
    return word
