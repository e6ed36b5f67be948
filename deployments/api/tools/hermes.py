"""Parses the calls of Hermes and Qwen, anywhere: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from collections.abc import Collection

from deployments.api.tools.marked import parse_marked
from deployments.api.tools.scanner import Scanner, parse_call
from deployments.api.tools.segments import Parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse_hermes(names: Collection[str]) -> Parser[None]:
    """Parse text, and calls of the functions `names`.

    A call without a closing mark ends with its object.
    """

    def call(at: Scanner, opening: str) -> Parser[None]:
        yield from at.spaces()
        yield from parse_call(at, names)

    return parse_marked((OPEN,), (CLOSE,), call)
