"""A compiled grammar, which requests share, and the memory that it counts.

llguidance computes the states of a grammar's automaton as masks need them. They stay, and all requests with the
grammar share them, so that most masks need no new ones. It does not report their number. They take a tenth of a
megabyte for most JSON schemas, some megabytes for patterns, and at most 64: when there are 50,000, all requests
that share them fail. So a much-used grammar is compiled again for the next request, which takes some milliseconds.
xgrammar computes all states when it compiles.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from engine.grammar.matcher import GrammarMatcher
from engine.grammar.spec import Grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MOST_MASKS = 2048
"""Masks after which the grammar is compiled again for new requests."""
STATES_BYTES = 8 * 2**20
"""Memory that is counted for the states that masks add."""
_UNTRIED_BYTES, _UNTRIED_BYTES_PER_CHAR = 2**18, 300
"""Bytes that are counted if they were not measured: those of the most expensive JSON schemas."""


class CompiledGrammar:
    """A matcher in its initial state, and counts of its use."""

    def __init__(self, matcher: GrammarMatcher, tokenizer: LLTokenizer, *, wears: bool = True) -> None:
        """`matcher` is copied before use and never advanced. `wears`: whether copies share states that grow."""
        self._wears = wears
        self.matcher = matcher
        self.tokenizer = tokenizer
        self.num_masks = 0
        """Masks of all requests that share it."""
        self.has_failed = False
        """Whether one of these requests failed, perhaps because it ran out of states."""

    @property
    def is_worn(self) -> bool:
        """Whether the grammar should be compiled again for new requests."""
        return self.has_failed or (self._wears and self.num_masks >= MOST_MASKS)


def weight(grammar: Grammar) -> int:
    """Return the bytes that a compiled grammar counts where it is kept."""
    size = grammar.compiled_bytes or _UNTRIED_BYTES + _UNTRIED_BYTES_PER_CHAR * len(grammar.source)
    return size + STATES_BYTES + sys.getsizeof(grammar.source)
