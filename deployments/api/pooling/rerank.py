"""Plans and encodes POST /v1/rerank, in the form of Jina's, Cohere's and vLLM's APIs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deployments.api.base.field_checks import in_range
from deployments.api.generation.generation_plan import GenerationPlan
from deployments.api.output.response_encoder import ResponseContext
from deployments.api.pooling.pairs import score_pairs
from deployments.api.pooling.plan import NUMBER_CHARS, PooledEncoder, Text, context_of, numbered, pooled_plan
from deployments.api.pooling.protocol import RerankRequest
from deployments.api.served.served_model import ServedModel
from deployments.config.limits import Limits
from engine.values.embedding import Vector

_RESULT_CHARS = NUMBER_CHARS + 64


async def plan_rerank(limits: Limits, served: ServedModel, request: RerankRequest) -> GenerationPlan:
    """Check and tokenize a request, and plan what to compute. Raises `ApiError`."""
    in_range("top_n", request.top_n, 0, 2**31 - 1)
    query = Text(request.query, "query")
    scored = await score_pairs(
        limits, served, request, [(query, document) for document in numbered("documents", request.documents)]
    )
    has_documents = request.return_documents is not False
    num_chars = _RESULT_CHARS + (max(map(len, request.documents)) if has_documents else 0)
    context = context_of("rerank", served, request, scored.prompts, num_chars)
    encoder = RerankEncoder(
        context, scored.scores, request.documents, has_documents=has_documents, top_n=request.top_n or None
    )
    return pooled_plan(served, request, encoder, scored.pooling, "documents")


class RerankEncoder(PooledEncoder):
    """Encodes answers as documents in the order of their scores, the best first."""

    def __init__(
        self,
        context: ResponseContext,
        scores: Callable[[Sequence[Vector]], list[float]],
        documents: Sequence[str],
        *,
        has_documents: bool,
        top_n: int | None,
    ) -> None:
        super().__init__(context)
        self._scores, self._documents = scores, documents
        self._has_documents, self._top_n = has_documents, top_n

    def results(self, values: Sequence[Vector]) -> dict[str, Any]:
        """Return the best documents."""
        scores = self._scores(values)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": scores[index]} for index in order[: self._top_n]
        ]
        if self._has_documents:
            for result in results:
                result["document"] = {"text": self._documents[result["index"]]}
        return {"id": self.context.id, "model": self.context.model, "results": results}
