"""Reasons why a grammar allows no token. They stand for a token from the sampler to the end of the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Literal

GrammarErrorCode = Literal["grammar_dead_end", "grammar_too_complex"]
"""Error codes of clients' grammars."""
_MOST_QUOTED = 120
"""Characters of an answer that an error quotes."""


class GrammarFailure(IntEnum):
    """A failure that stands for a token. All except `DEFECT` are for the grammar's author."""

    DEAD_END = -2
    """Nothing may follow, and the answer is not complete."""
    TOO_COMPLEX = -3
    """llguidance has given up, because the next mask takes more than its limits allow."""
    DEFECT = -4
    """The answer is not one that the grammar allows."""
    OVER_BUDGET = -5
    """The masks took more time than a request has for its whole answer."""


def explain(
    token: int, output: Sequence[int], text_of: Callable[[Sequence[int]], str] | None
) -> tuple[str, GrammarErrorCode | None]:
    """Return why a request has no token after its `output`, and the error's code if its grammar is the cause.

    `text_of` decodes tokens; None where there is no grammar.
    """
    if token == GrammarFailure.DEAD_END and text_of is not None:
        # Each token of an answer has a character, or a part of one.
        text = text_of(output[-4 * _MOST_QUOTED :])
        quoted = text if len(text) <= _MOST_QUOTED else "…" + text[-_MOST_QUOTED:]
        return f"the grammar allows neither a continuation nor the end after {quoted!r}", "grammar_dead_end"
    if token == GrammarFailure.TOO_COMPLEX:
        return f"the grammar became too complex to follow after {len(output)} tokens", "grammar_too_complex"
    if token == GrammarFailure.OVER_BUDGET:
        return (
            f"the grammar became too complex to follow: after {len(output)} tokens, its token masks had taken all "
            "the time that a request has for them (engine.grammar_mask_budget_s)"
        ), "grammar_too_complex"
    if token == GrammarFailure.DEFECT:
        return "the answer is not one that the request's grammar allows", None
    return "the model computed no valid probabilities", None
