"""The state of one request's grammar, which follows the request's output forwards and back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Protocol

from engine.grammar.compiled import CompiledGrammar
from engine.grammar.failure import GrammarFailure
from engine.grammar.mask_pace import MaskPace
from engine.grammar.matcher import GrammarMatcher


class ConstraintStatus(Enum):
    """Whether a grammar allows a history."""

    ALLOWED = "allowed"
    TAIL_REJECTED = "tail rejected"
    """The uncertain tail is not allowed: it has a wrong draft token, so the row's result will be dropped."""
    FAILED = "failed"
    """The request cannot continue: `Constraint.failure` has the reason."""


class OutputHistory(Protocol):
    """The generated tokens that precede the one to choose, such as a `SamplingRow`'s."""

    @property
    def num_known_output(self) -> int:
        """Number of leading generated tokens that are certain."""

    def output(self, start: int = 0) -> list[int]:
        """Return the generated tokens from index `start` on, which is at most `num_known_output`."""


class Constraint:
    """A matcher and the tokens it has consumed. Used by one thread at a time, which holds `lock`.

    output:   [ known | tail ]        tail: a token in flight, or draft tokens that may be wrong
    consumed: [ known | other tail ]  differing tokens are rolled back, missing ones consumed

    This one rule covers overlap, preemption, resuming and speculation.
    """

    def __init__(self, compiled: CompiledGrammar, pace: MaskPace | None = None) -> None:
        """`pace` bounds the time of its masks; None: no bound."""
        self.pace = pace or MaskPace()
        self.lock = threading.Lock()
        """Held while a step, or a thread for late masks, follows an output or computes a mask."""
        self.num_words = -(-compiled.tokenizer.vocab_size // 32)
        """Number of 32-bit words in a mask."""
        self._compiled = compiled
        self._matcher: GrammarMatcher | None = None
        self._consumed: list[int] = []
        self._is_rejected = False
        self._num_certain = 0
        """Number of leading tokens of `_consumed` that can never change and need not be compared again."""

    @property
    def matcher(self) -> GrammarMatcher:
        """The matcher in the state after the last `follow`."""
        if self._matcher is None:
            self._matcher = self._compiled.matcher.deep_copy()
        return self._matcher

    @property
    def failure(self) -> GrammarFailure | None:
        """The reason why the last mask or the last `follow` failed; a wrong tail is no failure."""
        if self.pace.is_over_budget:
            return GrammarFailure.OVER_BUDGET
        if not self.matcher.is_error():
            return GrammarFailure.DEFECT if self._is_rejected else None
        error = self.matcher.get_error()
        if error.startswith("NoExtension"):
            return GrammarFailure.DEAD_END
        self._compiled.has_failed = True
        return GrammarFailure.TOO_COMPLEX

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens. May be called by any thread."""
        return self._compiled.tokenizer.decode_str(list(tokens))

    def restart(self) -> None:
        """Forget the consumed tokens and a failure; the next `follow` consumes a whole output again."""
        self._matcher, self._num_certain = None, 0
        self._consumed.clear()

    def follow(self, history: OutputHistory) -> ConstraintStatus:
        """Advance the grammar to the end of an output, for a mask. O(new tokens of the output)."""
        self._compiled.num_masks += 1
        num_known = history.num_known_output
        rest = history.output(self._num_certain)
        had = self._consumed[self._num_certain :]
        num_same = _common(had, rest)
        if len(had) > num_same:
            self.matcher.rollback(len(had) - num_same)
            del self._consumed[self._num_certain + num_same :]
        wanted = rest[num_same:]
        valid = next((index for index, token in enumerate(wanted) if token < 0), len(wanted))  # no valid token
        taken = self.matcher.try_consume_tokens(wanted[:valid]) if valid else 0
        self._consumed += wanted[:taken]
        self._num_certain = min(len(self._consumed), num_known)
        self._is_rejected = self._num_certain < num_known
        if self.failure is not None:
            return ConstraintStatus.FAILED
        return ConstraintStatus.ALLOWED if taken == len(wanted) else ConstraintStatus.TAIL_REJECTED

    def is_ready(self, history: OutputHistory) -> bool:
        """Whether a step need not wait for the mask after `history`; otherwise a thread begins to compute it.

        Until it is ready, nothing else may use this constraint.
        """
        return self.pace.is_ready(history.num_known_output, partial(self._mask, history))

    def _mask(self, history: OutputHistory) -> bytes:
        """Return the mask after `history`; b"" if the grammar failed."""
        with self.lock:
            is_allowed = self.follow(history) is ConstraintStatus.ALLOWED
            return self.matcher.compute_bitmask() if is_allowed else b""


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
