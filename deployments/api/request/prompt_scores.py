"""What engines say of the prompts' own tokens, gathered from the choices' deltas.

A prompt is scored once: by the engine of its first choice. The other choices share its KV and wait here until its
scores are whole, as each choice's answer begins with them:

    choice 0   [ scores 1..2048 ][ scores ... ][ text ]──────────▶
    choice 1               [ text ][ text ]───── held ───────────▶ text
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence

from deployments.api.choices import ChoiceDelta
from deployments.api.errors import ApiError, invalid
from deployments.api.request.protocol import ChatRequest, CompletionRequest
from deployments.api.request.sampling import in_range
from deployments.config.limits import Limits
from engine.logprobs import PackedLogprobs, TokenLogprobs, joined

logger = logging.getLogger(__name__)


def requested_scores(
    request: ChatRequest | CompletionRequest, limits: Limits, *, echoed: int | None = None
) -> int | None:
    """Alternatives that engines have to report for each prompt token; None: no scores are asked for.

    `echoed` are those of an echoed prompt. Raises `ApiError`.
    """
    asked = request.prompt_logprobs
    in_range("prompt_logprobs", asked, 0, limits.max_prompt_logprobs)
    if asked is not None and request.stream:
        raise invalid(
            "prompt_logprobs is not available with stream; leave one of them out. Completions can stream echo "
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
    """Where the scores of `prompts`, as token ids, are gathered from `num_candidates` answers to each.

    Raises `ApiError` when they are too many.
    """
    if num_top is None:
        return None
    scores = PromptScores(prompts, request.n or 1, num_top, num_candidates)
    if scores.num_entries > limits.max_prompt_logprob_entries:
        raise invalid(
            f"The answer would have {scores.num_entries} log-probabilities of prompt tokens, at most "
            f"{limits.max_prompt_logprob_entries} are allowed: ask for fewer alternatives or choices, or send "
            "shorter prompts.",
            "logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
        )
    return scores


class PromptScores:
    """The scores of one request's prompts. Lives as long as its answer."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], num_choices: int, num_top: int, num_candidates: int
    ) -> None:
        """`prompts` are token ids, each with `num_candidates` answers, of which `num_choices` are given.

        Of each token `num_top` alternatives are asked for.
        """
        self.num_top = num_top
        self._prompts, self._num_choices, self._num_candidates = prompts, num_choices, num_candidates
        self._parts: list[PackedLogprobs | None] = [None] * len(prompts)

    @property
    def num_entries(self) -> int:
        """Log-probabilities in an answer that has them once for each choice."""
        return sum(map(len, self._prompts)) * (self.num_top + 1) * self._num_choices

    def of(self, choice: int) -> list[TokenLogprobs]:
        """Those of the tokens of a choice's prompt but for the first, once they are whole."""
        prompt = choice // self._num_choices
        part = self._parts[prompt]
        return [] if part is None else part.read(self._prompts[prompt][part.start : part.end])

    async def gathered(self, deltas: AsyncIterator[ChoiceDelta]) -> AsyncIterator[ChoiceDelta]:
        """`deltas`, each held back until its prompt's scores are whole. Raises `ApiError` if they never are."""
        held: list[list[ChoiceDelta]] = [[] for _ in self._prompts]
        async for delta in deltas:
            prompt = delta.index // self._num_candidates
            self._parts[prompt] = joined(self._parts[prompt], delta.prompt_logprobs)
            held[prompt].append(delta)
            if self._is_whole(prompt):
                for waiting in held[prompt]:
                    yield waiting
                held[prompt].clear()
        if any(held):
            logger.error("a prompt's log-probabilities are not whole")
            raise ApiError(500, "The engine failed on this request.", code="engine_error")

    def _is_whole(self, prompt: int) -> bool:
        part = self._parts[prompt]
        return (1 if part is None else part.end) >= len(self._prompts[prompt])
