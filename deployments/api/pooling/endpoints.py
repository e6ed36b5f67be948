"""The endpoints that generate nothing, by their paths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from deployments.api.generation.generation_plan import GenerationPlan
from deployments.api.pooling.embeddings import plan_embeddings
from deployments.api.pooling.protocol import (
    EmbeddingsRequest,
    PooledRequest,
    RerankRequest,
    ScoreRequest,
    parse_embeddings,
    parse_pairs,
)
from deployments.api.pooling.rerank import plan_rerank
from deployments.api.pooling.score import plan_score
from deployments.api.served.served_model import ServedModel
from deployments.config.limits import Limits


@dataclass(frozen=True, slots=True)
class PooledKind:
    """One kind of such requests."""

    name: str
    purpose: str
    """Its description in /openapi.json."""
    body: type[PooledRequest]
    parse: Callable[[dict[str, Any], Limits], tuple[Any, Sequence[str]]]
    """Reads a body: returns a request, and the names of ignored fields to be shown."""
    plan: Callable[[Limits, ServedModel, Any], Awaitable[GenerationPlan]]
    """Checks and tokenizes the request."""


_EMBEDDINGS = PooledKind(
    "embeddings",
    "Embed texts, as OpenAI's API does.",
    EmbeddingsRequest,
    parse_embeddings,
    plan_embeddings,
)

_RERANK = PooledKind(
    "rerank",
    "Order documents by how well they answer a query, as Jina's, Cohere's and vLLM's APIs do.",
    RerankRequest,
    partial(parse_pairs, kind=RerankRequest),
    plan_rerank,
)
_SCORE = PooledKind(
    "score",
    "Score pairs of texts, as vLLM does.",
    ScoreRequest,
    partial(parse_pairs, kind=ScoreRequest),
    plan_score,
)

POOLED: Mapping[str, PooledKind] = {
    "/v1/embeddings": _EMBEDDINGS,
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), _RERANK),
    **dict.fromkeys(("/v1/score", "/score"), _SCORE),
}
