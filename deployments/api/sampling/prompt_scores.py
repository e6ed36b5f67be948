"""Collects the log-probabilities of prompt tokens (scores) from the choices' deltas.

A prompt is scored once, by the engine of its first choice. The other choices share its KV and are held here until
the scores are complete, because each choice's answer begins with them:

    choice 0   [ scores 1..2048 ][ scores ... ][ text ]──────────▶
    choice 1               [ text ][ text ]───── held ───────────▶ text
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence

from deployments.api.base.errors import ApiError, invalid
from deployments.api.base.field_checks import in_range
from deployments.api.fields.protocol import ChatRequest, CompletionRequest
from deployments.api.output.choice import Group
from deployments.config.limits import Limits
from engine.values.logprobs import PackedLogprobs, TokenLogprobs, joined

logger = logging.getLogger(__name__)


def requested_scores(
    request: ChatRequest | CompletionRequest, limits: Limits, *, echoed: int | None = None
) -> int | None:
    """Return the number of alternatives to report for each prompt token; None if no scores are requested.

    `echoed` is the number for an echoed prompt. Raises `ApiError`.
    """
    asked = request.prompt_logprobs
    in_range("prompt_logprobs", asked, 0, limits.max_prompt_logprobs, "limits.max_prompt_logprobs")
    if asked is not None and request.stream:
        raise invalid(
            "prompt_logprobs cannot be combined with stream; leave one of them out. Completions can stream echo "
            "with logprobs.",
            "prompt_logprobs",
        )
    return max((count for count in (asked, echoed) if count is not None), default=None)


def scores_of(
    request: ChatRequest | CompletionRequest,
    limits: Limits,
    prompts: Sequence[Sequence[int]],
    num_top: int | None,
    num_candidates: int,
) -> PromptScores | None:
    """Create the collector of scores for `prompts` (token ids) with `num_candidates` answers each.

    Raises `ApiError` when there would be too many scores.
    """
    if num_top is None:
        return None
    scores = PromptScores(prompts, request.n or 1, num_top, num_candidates)
    if scores.num_entries > limits.max_prompt_logprob_entries:
        raise invalid(
            f"The answer would have {scores.num_entries} log-probabilities of prompt tokens, but at most "
            f"{limits.max_prompt_logprob_entries} are allowed (limits.max_prompt_logprob_entries); ask for fewer "
            "alternatives or choices, or send shorter prompts.",
            "logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
        )
    return scores


class PromptScores:
    """Scores of one request's prompts. Lives as long as the response."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], num_choices: int, num_top: int, num_candidates: int
    ) -> None:
        """`prompts` are token ids, each with `num_candidates` answers, of which `num_choices` are returned.

        `num_top` is the number of alternatives to each token.
        """
        self.num_top = num_top
        self._prompts, self._num_choices, self._num_candidates = prompts, num_choices, num_candidates
        self._parts: list[PackedLogprobs | None] = [None] * len(prompts)

    @property
    def num_entries(self) -> int:
        """Number of log-probabilities in a response that repeats them for each choice."""
        return sum(map(len, self._prompts)) * (self.num_top + 1) * self._num_choices

    def of(self, choice: int) -> list[TokenLogprobs]:
        """Return the scores of a choice's prompt tokens after the first, once they are complete."""
        prompt = choice // self._num_choices
        part = self._parts[prompt]
        return [] if part is None else part.read(self._prompts[prompt][part.start : part.end])

    async def gathered(self, groups: AsyncIterator[Group]) -> AsyncIterator[Group]:
        """Yield each group once its prompt's scores are complete. Raises `ApiError` if they never are."""
        held: list[list[Group]] = [[] for _ in self._prompts]
        async for group in groups:
            prompt = group.index // self._num_candidates
            for delta in group.deltas:
                self._parts[prompt] = joined(self._parts[prompt], delta.prompt_logprobs)
            held[prompt].append(group)
            if self._is_whole(prompt):
                for waiting in held[prompt]:
                    yield waiting
                held[prompt].clear()
        if any(held):
            logger.error("an engine reported only part of a prompt's log-probabilities")
            raise ApiError(500, "The engine failed on this request.", code="engine_error")

    def _is_whole(self, prompt: int) -> bool:
        part = self._parts[prompt]
        return (1 if part is None else part.end) >= len(self._prompts[prompt])
