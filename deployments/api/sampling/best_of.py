"""`best_of`: generate several answers and return the likeliest.

    prompt 0 ─ candidate 0 .. best_of - 1 ─▶ the n of them with the highest mean log-probability, best first
    prompt 1 ─ candidate 0 ..

Usage and rate limits count all generated tokens, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployments.api.base.errors import invalid
from deployments.api.base.field_checks import in_range
from deployments.api.fields.protocol import ChatRequest, CompletionRequest
from deployments.api.output.choice import Choice, ChoiceDelta
from deployments.config.limits import Limits


def num_candidates(request: ChatRequest | CompletionRequest, limits: Limits) -> int:
    """Return the number of answers to generate for each prompt. Raises `ApiError` 400 that names the field."""
    wanted = request.n or 1
    if isinstance(request, CompletionRequest):
        each, prompts = request.best_of or wanted, len(request.prompt)
        if each * prompts > limits.max_answers:
            raise invalid(
                f"{prompts} prompts with {each} answers each are {each * prompts} answers, but a request may have "
                f"at most {limits.max_answers} (limits.max_answers); send fewer prompts in a request.",
                "n" if request.best_of is None else "best_of",
            )
    if request.best_of is None:
        return wanted
    in_range("best_of", request.best_of, 1, limits.max_best_of, "limits.max_best_of")
    if request.best_of < wanted:
        raise invalid(
            f"best_of must be at least n ({wanted}), as n of the best_of generated answers are returned; "
            f"got {request.best_of}.",
            "best_of",
        )
    if request.best_of > wanted and request.stream:
        raise invalid(
            "stream cannot be combined with a best_of above n, as the best answers are known only at the end.",
            "stream",
        )
    return request.best_of


def best(
    choices: Sequence[Choice], deltas: Sequence[Sequence[ChoiceDelta]], num_prompts: int, n: int
) -> list[list[ChoiceDelta]]:
    """Return the deltas of each prompt's `n` likeliest choices, best first; ties keep their order."""
    per_prompt = len(choices) // num_prompts
    kept = []
    for first in range(0, len(choices), per_prompt):
        ranked = sorted(choices[first : first + per_prompt], key=lambda choice: -choice.mean_logprob)
        kept += [list(deltas[choice.index]) for choice in ranked[:n]]
    return kept
