"""What follows a grammar along an answer: the one interface to both libraries, llguidance and xgrammar."""

from __future__ import annotations

from typing import Protocol


class GrammarMatcher(Protocol):
    """A grammar's state after some tokens. llguidance's `LLMatcher` is one. Used by one thread at a time.

    No method raises for what is wrong with a grammar: the matcher then has an error, and keeps it.
    """

    def deep_copy(self) -> GrammarMatcher:
        """Return an independent matcher in the same state."""
        ...

    def compute_bitmask(self) -> bytes:
        """Return which tokens may follow, an end if the answer may end here: bit i is for token i, lowest first.

        At least as many 32-bit words as the vocabulary needs. No bit is set where nothing may follow.
        """
        ...

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Consume leading tokens up to the first that is not allowed; returns how many."""
        ...

    def rollback(self, num_tokens: int) -> bool:
        """Go back by the last tokens that were consumed; returns whether that was possible."""
        ...

    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        ...

    def is_stopped(self) -> bool:
        """Whether the answer has ended, or only an end may follow."""
        ...

    def is_error(self) -> bool:
        """Whether the grammar cannot be followed any further."""
        ...

    def get_error(self) -> str:
        """Return why, for a log; "" if nothing is wrong."""
        ...
