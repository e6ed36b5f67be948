"""Beam search: which hypotheses continue, which are finished, and when the search is over.

                      ┌─ ends, and is among the first `width`: finished; the best `width` of these are kept
    best candidates ──┤
     of all beams     └─ continues: the best `width` of these are the next step's beams

From equal log-probabilities it makes the same tokens as transformers' `generate(num_beams=width,
do_sample=False)`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a search. `engine.values.sampling_params` checks their ranges."""

    width: int
    """Hypotheses followed at a time."""
    num_returned: int = 1
    """How many of the best hypotheses are returned; at most `width`."""
    length_penalty: float = 1.0
    """A hypothesis scores sum of log-probabilities / length ** length_penalty: above 0 favours long ones."""
    early_stopping: EarlyStopping = False
    """When to end once `width` hypotheses are finished. True: immediately. False: when the best running one, if it
    ended now, would not be among them. "never": when it could not be among them at any length."""

    def num_candidates(self, num_stop_ids: int) -> int:
        """Number of candidates among which at least `width` do not end: a beam can end in any stop token."""
        return max(2, 1 + num_stop_ids) * self.width


class BeamCandidate(NamedTuple):
    """A beam and a token that may follow it."""

    score: float
    """Sum of the log-probabilities of all tokens generated, this one included."""
    beam: int
    """Index of the beam in its step."""
    token_id: int


class Hypothesis(NamedTuple):
    """A finished output."""

    token_ids: tuple[int, ...]
    """Generated ids, including the stop token that ended it."""
    score: float
    """Sum of log-probabilities / length ** length_penalty."""
    finish_reason: Literal["stop", "length"]

    @property
    def text_ids(self) -> tuple[int, ...]:
        """The tokens that become text: all but the stop token that ended it."""
        return self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids


@dataclass(slots=True)
class BeamSearch:
    """One search. It knows the scores and the finished hypotheses; the scheduler knows where the KV is."""

    params: BeamParams
    stop_ids: Collection[int]
    max_output: int
    """Tokens at which every hypothesis ends."""
    num_generated: int = 0
    """Tokens in each running beam."""
    scores: list[float] = field(default_factory=lambda: [0.0])
    """Scores of the running beams, best first; at first only that of the prompt."""
    finished: list[Hypothesis] = field(default_factory=list)
    """Finished hypotheses, at most `width`, best first."""
    ended: list[int] = field(default_factory=list)
    """The last step's beams from which a hypothesis was finished."""

    def advance(
        self, outputs: Sequence[Sequence[int]], continuations: Sequence[Sequence[tuple[int, float]]]
    ) -> list[BeamCandidate]:
        """Take a step and return the next beams, best first; none when the search is over.

        outputs: each running beam's generated ids. continuations: each beam's (token, log-probability) pairs, best
        first, at least `num_candidates` of them if the vocabulary is that large.
        """
        candidates = best_candidates(self.scores, continuations, self.params.num_candidates(len(self.stop_ids)))
        self.num_generated += 1
        self.ended.clear()
        is_last = self.num_generated >= self.max_output
        running = []
        for rank, candidate in enumerate(candidates):
            if not is_last and candidate.token_id not in self.stop_ids:
                running.append(candidate)
            elif rank < self.params.width:
                self._finish(outputs[candidate.beam], candidate)
        del running[self.params.width :]
        self.scores = [candidate.score for candidate in running]
        return running if self._can_improve() else []

    def _finish(self, output: Sequence[int], last: BeamCandidate) -> None:
        self.ended.append(last.beam)
        score = self._normalized(last.score, self.num_generated)
        reason: Literal["stop", "length"] = "stop" if last.token_id in self.stop_ids else "length"
        self.finished.append(Hypothesis((*output, last.token_id), score, reason))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.params.width :]

    def _can_improve(self) -> bool:
        """Whether a running beam could still become one of the finished hypotheses."""
        if not self.scores or len(self.finished) < self.params.width:
            return bool(self.scores)
        if self.params.early_stopping is True or self.params.width == 1:  # A single beam is greedy decoding.
            return False
        is_longer_better = self.params.early_stopping == "never" and self.params.length_penalty > 0
        length = self.max_output if is_longer_better else self.num_generated
        return self._normalized(self.scores[0], length) > self.finished[-1].score

    def _normalized(self, score: float, length: int) -> float:
        return score / math.pow(length, self.params.length_penalty)


def best_candidates(
    scores: Sequence[float], continuations: Sequence[Sequence[tuple[int, float]]], count: int
) -> list[BeamCandidate]:
    """Return the `count` best of all beams' continuations, best first, without impossible ones (-inf)."""
    candidates = [
        BeamCandidate(score + logprob, beam, token)
        for beam, (score, continuation) in enumerate(zip(scores, continuations, strict=True))
        for token, logprob in continuation
        if logprob > float("-inf")
    ]
    candidates.sort(key=lambda candidate: (-candidate.score, candidate.beam, candidate.token_id))
    return candidates[:count]
