"""Plans and encodes POST /v1/score, in vLLM's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deployments.api.base.errors import invalid
from deployments.api.base.field_checks import at_most
from deployments.api.generation.generation_plan import GenerationPlan
from deployments.api.output.response_encoder import ResponseContext
from deployments.api.pooling.pairs import score_pairs
from deployments.api.pooling.plan import NUMBER_CHARS, PooledEncoder, context_of, numbered, pooled_plan
from deployments.api.pooling.protocol import COUPLES, ScoreRequest
from deployments.api.served.served_model import ServedModel
from deployments.config.limits import Limits
from engine.values.embedding import Vector


async def plan_score(limits: Limits, served: ServedModel, request: ScoreRequest) -> GenerationPlan:
    """Check and tokenize a request, and plan what to compute. Raises `ApiError`."""
    first, second = _names(request)
    left, right = (numbered(name, getattr(request, name)) for name in (first, second))
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise invalid(
            f"{first} has {len(left)} texts and {second} {len(right)}: give as many, or one {first} for all.",
            first,
        )
    at_most(limits, "max_inputs", second, len(right), "texts")
    scored = await score_pairs(limits, served, request, list(zip(left, right, strict=True)))
    context = context_of("score", served, request, scored.prompts, NUMBER_CHARS + 64)
    return pooled_plan(served, request, ScoreEncoder(context, scored.scores), scored.pooling, second)


def _names(request: ScoreRequest) -> tuple[str, str]:
    """Return the names of the sides that a request gives. Raises `ApiError` unless they are one couple."""
    given = {name for couple in COUPLES for name in couple if getattr(request, name) is not None}
    found = [couple for couple in COUPLES if set(couple) == given]
    if not found:
        couples = ", ".join(" and ".join(couple) for couple in COUPLES)
        has = f"; it has {', '.join(sorted(given))}" if given else ""
        raise invalid(f"The body must have one of these pairs of fields: {couples}{has}.", "text_1")
    return found[0]


class ScoreEncoder(PooledEncoder):
    """Encodes answers as lists of scores, in the order of the pairs."""

    def __init__(self, context: ResponseContext, scores: Callable[[Sequence[Vector]], list[float]]) -> None:
        super().__init__(context)
        self._scores = scores

    def results(self, values: Sequence[Vector]) -> dict[str, Any]:
        """Return the scores."""
        data = [
            {"index": index, "object": "score", "score": score} for index, score in enumerate(self._scores(values))
        ]
        head = self.context
        return {"id": head.id, "object": "list", "created": head.created, "model": head.model, "data": data}
