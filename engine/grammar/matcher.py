"""The matcher follows a grammar along an answer: one interface to both libraries, llguidance and xgrammar."""

from __future__ import annotations

from typing import Protocol


class GrammarMatcher(Protocol):
    """A grammar's state after some tokens. llguidance's `LLMatcher` is one. Used by one thread at a time.

    No method raises because of a wrong grammar: the matcher then has an error, and keeps it.
    """

    def deep_copy(self) -> GrammarMatcher:
        """Return an independent matcher in the same state."""

    def compute_bitmask(self) -> bytes:
        """Return the tokens that may follow, including an end if the answer may end here: bit i is for token i,
        lowest first.

        It has at least as many 32-bit words as the vocabulary needs. No bit is set if nothing may follow.
        """

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Consume leading tokens up to the first that is not allowed; returns how many."""

    def rollback(self, num_tokens: int) -> bool:
        """Undo the last `num_tokens` consumed tokens; returns whether that was possible."""

    def is_accepting(self) -> bool:
        """Whether the answer may end here."""

    def is_error(self) -> bool:
        """Whether the grammar cannot be followed any further."""

    def get_error(self) -> str:
        """Return the error, for a log; "" if there is none."""
