"""One request's way through its grammar: brought to any history of it, forwards and back."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llguidance import LLMatcher


class ConstraintStatus(Enum):
    """How a history and a grammar go together."""

    ALLOWED = "allowed"
    TAIL_REJECTED = "tail rejected"
    """Its uncertain end is not allowed: a wrong draft, whose outcome nobody will see."""
    FAILED = "failed"
    """What it certainly holds is not allowed, or llguidance gave up: the request cannot go on."""


class OutputHistory(Protocol):
    """The generated tokens after which the next one is chosen, such as a `Row`'s."""

    @property
    def num_known_output(self) -> int:
        """How many of them are certain; they come first."""
        ...

    def output(self, start: int = 0) -> list[int]:
        """The generated tokens from index `start` on, which is at most `num_known_output`."""
        ...


class Constraint:
    """A matcher and what it has consumed. Used by one thread at a time.

    output:   [ known | tail ]        tail: in flight, or a draft that may be wrong
    consumed: [ known | other tail ]  what differs is rolled back, what is missing is consumed

    Overlap, preemption, resuming and speculation are all this one rule.
    """

    def __init__(self, compiled: LLMatcher, num_tokens: int) -> None:
        """`compiled`: the grammar at its beginning; it is not changed. `num_tokens`: ids that its masks cover."""
        self.num_words = -(-num_tokens // 32)
        """Words of 32 bits in a mask."""
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._consumed: list[int] = []
        self._num_certain = 0
        """Leading tokens of `_consumed` that can never change: they need not be compared again."""

    @property
    def matcher(self) -> LLMatcher:
        """Where the grammar stands after the last `follow`."""
        if self._matcher is None:
            self._matcher = self._compiled.deep_copy()
        return self._matcher

    @property
    def has_failed(self) -> bool:
        """Whether llguidance gave up, its fuel being spent; never true of a token that is not allowed."""
        return self.matcher.is_error()

    def follow(self, history: OutputHistory) -> ConstraintStatus:
        """Bring the grammar to the end of an output. Costs as much as the output holds that is new."""
        num_known = history.num_known_output
        rest = history.output(self._num_certain)
        had = self._consumed[self._num_certain :]
        num_same = _common(had, rest)
        if len(had) > num_same:
            self.matcher.rollback(len(had) - num_same)
            del self._consumed[self._num_certain + num_same :]
        wanted = rest[num_same:]
        valid = next((index for index, token in enumerate(wanted) if token < 0), len(wanted))  # no token was found
        taken = self.matcher.try_consume_tokens(wanted[:valid]) if valid else 0
        self._consumed += wanted[:taken]
        self._num_certain = min(len(self._consumed), num_known)
        if self.has_failed or self._num_certain < num_known:
            return ConstraintStatus.FAILED
        return ConstraintStatus.ALLOWED if taken == len(wanted) else ConstraintStatus.TAIL_REJECTED


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
