"""Parses reasoning: <think>...</think> at the beginning of a model's text."""

from __future__ import annotations

from deployments.api.tools.scanner import Scanner
from deployments.api.tools.segments import Parser, Segment

OPEN, CLOSE = "<think>", "</think>"


def parse_reasoning(*, is_open: bool) -> Parser[None]:
    """Parse reasoning, then text. With `is_open`, the prompt ended with the opening mark: the text begins inside.

    White space around the marks is dropped. Reasoning that nothing closes extends to the end of the text.
    """
    at = Scanner()
    yield from at.spaces()
    found = yield from at.mark(OPEN, CLOSE)
    if found != OPEN and not is_open:
        yield from at.look()
        yield from at.release()
        return
    yield Segment("reasoning")
    if found == OPEN:
        at.drop()
        yield from at.spaces()
    if not at.held.strip():
        at.drop()
    while found != CLOSE:
        yield from at.spaces()
        found = yield from at.mark(CLOSE)
        if not found and not (yield from at.look()):
            if at.held.strip():
                yield from at.release("reasoning")
            break
        if not found:
            yield from at.text("reasoning")
    at.drop()
    yield Segment("answer")
    yield from at.spaces()
