"""Parses calls as Mistral's models write them, after [TOOL_CALLS]: as a list of objects, or with the name before.

[TOOL_CALLS][{"name": NAME, "arguments": {...}}, ...]
[TOOL_CALLS]NAME[ARGS]{...}[TOOL_CALLS]NAME{...}
"""

from __future__ import annotations

from deployments.api.dialects.json_calls import parse_arguments
from deployments.api.dialects.listed import parse_calls
from deployments.api.dialects.marked import parse_marked
from deployments.api.dialects.named import Functions
from deployments.api.dialects.scanner import Malformed, Scanner
from deployments.api.dialects.segments import Parser

MARK, ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKS = (MARK, ARGUMENTS, _ID)
_OBJECTS = ("[", "{", "`")
"""First characters of a list of calls, a call or a fenced block."""


def parse_mistral(functions: Functions, until: str = "") -> Parser[None]:
    """Parse text, and calls of `functions`."""

    def calls(at: Scanner, opening: str) -> Parser[None]:
        char = yield from at.spaces()
        yield from (parse_calls(at, functions) if char in _OBJECTS else _named(at, functions))

    return parse_marked((MARK,), (), calls, until=until)


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
