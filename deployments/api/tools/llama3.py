"""Parses calls as Llama 3.1 and later write them: {"name": ..., "parameters": {...}}, separated by semicolons.

Calls stand at the beginning of an answer or after <|python_tag|>; anything else is text.
"""

from __future__ import annotations

from collections.abc import Collection

from deployments.api.tools.scanner import Malformed, Scanner, parse_call
from deployments.api.tools.segments import Parser

PYTHON_TAG = "<|python_tag|>"


def parse_llama3(names: Collection[str]) -> Parser[None]:
    """Parse text, and calls of the functions `names`. White space around calls is dropped."""
    at = Scanner((PYTHON_TAG,))
    has_called = yield from _calls(at, names)
    while True:
        yield from at.spaces()
        if (yield from at.mark(PYTHON_TAG)):
            has_called = yield from _calls(at, names)
        elif (yield from at.look()):
            yield from at.text()
        else:
            is_layout = has_called and at.held.strip() in ("", ";")
            if not is_layout:
                yield from at.release()
            return


def _calls(at: Scanner, names: Collection[str]) -> Parser[bool]:
    """Parse consecutive calls and return whether there is one. Anything else is text."""
    has_called = False
    while True:
        char = yield from at.spaces()
        if char == ";" and has_called:
            at.take()
            char = yield from at.spaces()
        if char != "{":
            break
        try:
            yield from parse_call(at, names)
        except Malformed:
            break
        has_called = True
    if not has_called or (yield from at.look()):
        yield from at.release()
    return has_called
