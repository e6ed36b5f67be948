"""Parses the calls of Hermes and Qwen, anywhere: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from collections.abc import Collection

from deployments.api.tools.scanner import Malformed, Scanner, parse_call
from deployments.api.tools.segments import Parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse_hermes(names: Collection[str]) -> Parser[None]:
    """Parse text, and calls of the functions `names`. White space around calls is dropped.

    A call without a closing mark ends with its object; at the end of the text, a truncated closing mark suffices.
    """
    at = Scanner()
    is_open = has_called = False
    while True:
        yield from at.spaces()
        found = yield from at.mark(OPEN, CLOSE)
        if found == OPEN:
            try:
                yield from at.spaces()
                is_open = yield from parse_call(at, names, ("arguments",))
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
