"""A compiled grammar, which requests share, and how much memory it counts.

llguidance computes the states of a grammar's automaton as masks need them. They stay, and all requests with the
grammar share them, so that most masks need no new ones. It does not tell how many there are. They take a tenth of
a megabyte for most JSON schemas, some megabytes for patterns, and 64 at most: when there are 50,000, all requests
that share them fail. So a grammar that was used much is compiled anew for the next request: some milliseconds.
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
"""Masks after which new requests have the grammar compiled anew."""
STATES_BYTES = 8 * 2**20
"""Memory that is counted for the states that masks add."""
_UNTRIED_BYTES, _UNTRIED_BYTES_PER_CHAR = 2**18, 300
"""What is counted where nobody has measured it: what those JSON schemas take that take most."""


class CompiledGrammar:
    """A matcher in its initial state, and how much it was used."""

    def __init__(self, matcher: GrammarMatcher, tokenizer: LLTokenizer, *, wears: bool = True) -> None:
        """`matcher` is copied before use and never advanced. `wears`: whether its copies share growing states."""
        self._wears = wears
        self.matcher = matcher
        self.tokenizer = tokenizer
        self.num_masks = 0
        """Masks of all requests that share it."""
        self.has_failed = False
        """Whether one of these requests failed, perhaps for want of states."""

    @property
    def is_worn(self) -> bool:
        """Whether new requests should have the grammar compiled anew."""
        return self.has_failed or (self._wears and self.num_masks >= MOST_MASKS)


def weight(grammar: Grammar) -> int:
    """Return the bytes that a compiled grammar counts where it is kept."""
    size = grammar.compiled_bytes or _UNTRIED_BYTES + _UNTRIED_BYTES_PER_CHAR * len(grammar.source)
    return size + STATES_BYTES + sys.getsizeof(grammar.source)
