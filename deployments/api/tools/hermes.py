"""Parses the calls of Hermes and Qwen, anywhere: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from deployments.api.tools.scanner import Malformed, Scanner, parse_call
from deployments.api.tools.segments import Parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse_hermes(names: Collection[str]) -> Parser[None]:
    """Parse text, and calls of the functions `names`.

    A call without a closing mark ends with its object.
    """

    def call(at: Scanner, opening: str) -> Parser[bool]:
        yield from at.spaces()
        return (yield from parse_call(at, names, ("arguments",)))

    return parse_marked((OPEN,), call)


def parse_marked(openings: Sequence[str], call: Callable[[Scanner, str], Parser[bool]]) -> Parser[None]:
    """Parse text, and calls that begin with one of `openings` and end with `CLOSE`. White space around calls is
    dropped; at the end of the text, a truncated closing mark suffices.

    `call` parses what comes after the opening, which it is given: it returns whether the call is complete, and
    raises `Malformed` if it is none.
    """
    at = Scanner()
    is_open = has_called = False
    while True:
        yield from at.spaces()
        found = yield from at.mark(*openings, CLOSE)
        if found in openings:
            try:
                is_open = yield from call(at, found)
                has_called = True
            except Malformed:
                is_open = False
                yield from at.release()
        elif found == CLOSE and is_open:
            at.drop()
            is_open = False
        elif (yield from at.look()):
            is_open = False
            yield from at.text()
        else:
            rest = at.held.strip()
            is_layout = (is_open and CLOSE.startswith(rest)) or (has_called and not rest)
            if not is_layout:
                yield from at.release()
            return
