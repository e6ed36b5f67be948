"""Parses calls as objects after a mark: MARK[{"name": NAME, "arguments": {...}}, ...].

Hermes     <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
Granite 3  <|tool_call|>[{"name": NAME, "arguments": {...}}]
Phi-4      functools[{"name": NAME, "arguments": {...}}]
Mistral    [TOOL_CALLS][{"name": NAME, "arguments": {...}}]
Llama 3    {"name": NAME, "parameters": {...}}; {"name": NAME, "parameters": {...}}

Llama's calls are at the beginning of an answer, or after <|python_tag|>; Qwen's are like Hermes'.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployments.api.dialects.json_calls import FENCE, fence, parse_call
from deployments.api.dialects.marked import parse_marked
from deployments.api.dialects.named import Functions
from deployments.api.dialects.scanner import Malformed, Scanner
from deployments.api.dialects.segments import Parser

PYTHON_TAG = "<|python_tag|>"
_BETWEEN, _ENDS = ",;", "]}"


def parse_listed(
    openings: Sequence[str],
    closings: Sequence[str],
    functions: Functions,
    until: str = "",
    *,
    initial: str | None = None,
) -> Parser[None]:
    """Parse text, and calls of `functions` after `openings`."""

    def calls(at: Scanner, opening: str) -> Parser[None]:
        yield from parse_calls(at, functions)

    return parse_marked(openings, closings, calls, initial=initial, until=until)


def parse_calls(at: Scanner, functions: Functions) -> Parser[None]:
    """Parse calls in a list or in sequence, perhaps in a fenced block, up to the first text that is no call.

    Raises `Malformed` if the first is none, with all that was taken still held.
    """
    yield from fence(at)
    if (yield from at.look()) == "[":
        yield from at.token("[")
    yield from parse_call(at, functions)
    while char := (yield from at.spaces()):
        if char in _BETWEEN:
            at.take()
            char = yield from at.spaces()
        if char == "{":
            count = at.num_held
            try:
                yield from parse_call(at, functions)
            except Malformed:
                at.back(count)
                return
        elif char and char in _ENDS:
            at.take()
            at.drop()
        elif (yield from at.mark(FENCE)):
            at.drop()
        elif char:
            return
    at.drop()
