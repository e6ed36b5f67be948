"""The grammar of an answer in channels (gpt-oss), in llguidance's Lark syntax.

    start: analysis? preamble? calls                      a call is required
    start: analysis? (calls | final? answer)              the answer has a schema; calls may be made instead
    start: analysis? preamble? (calls | final? text)      calls are optional but have schemas (`strict`)

A message's header is omitted if it has already begun, and `final` if the model writes the bare answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from deployments.api.constraints.thinking_budget import ThinkingBudget
from deployments.api.dialects.harmony import CHANNEL, END, MESSAGE, NEXT

Literal = Callable[[str], str]
"""Writes text in Lark's syntax, with references to special tokens."""


def channel_rules(
    calls: str | None,
    answer: str | None,
    *,
    is_forced: bool,
    literal: Literal,
    has_specials: bool,
    budget: ThinkingBudget | None,
) -> list[str]:
    """Return the rules of an answer. `calls` is the block of its calls, `answer` the rule of its text, if it has
    any. `literal` writes marks; `has_specials` says whether they are special tokens.
    """
    inside = f"/(?s:.*)/ {literal(END)}"
    lazy = "" if has_specials else "[lazy]"
    if not has_specials:
        inside = f"/(?s:.*){re.escape(END)}/"
    rules = [f"inside{lazy}: {inside}", f"next: {literal(NEXT)}"]
    thought = "inside"
    if budget is not None:
        thought = budget.thoughts
        rules.append(budget.rules)
    rules.append(f"analysis: {literal(f'{CHANNEL}analysis{MESSAGE}')} {thought} next?")
    rules.append(f"preamble: {literal(f'{CHANNEL}commentary{MESSAGE}')} inside next?")
    rules.append(f"final: {literal(f'{CHANNEL}final{MESSAGE}')}")
    body = f"final? {answer}"
    if answer is None:
        # Where marks are text, text that begins with one is a header.
        body, bare = "(final anything | bare)", "anything" if has_specials else "/([^<](?s:.*))?/"
        rules += ["anything: /(?s:.*)/" if budget is None else f"anything: {budget.anything}", f"bare: {bare}"]
    if calls is not None:
        body = f"({calls})" if is_forced else f"(({calls}) | {body})"
    return [f"start: analysis? {'preamble? ' if calls is not None else ''}{body}", *rules]
