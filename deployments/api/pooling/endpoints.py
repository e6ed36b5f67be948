"""The endpoints that generate nothing, by their paths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.api.exchange import GenerationPlan
from deployments.api.pooling.embeddings import plan_embeddings
from deployments.api.pooling.protocol import EmbeddingsRequest, PooledRequest, parse_embeddings
from deployments.api.service import ServedModel
from deployments.config.limits import Limits


@dataclass(frozen=True, slots=True)
class PooledKind:
    """One kind of such requests."""

    name: str
    purpose: str
    """What /openapi.json says of it."""
    body: type[PooledRequest]
    parse: Callable[[dict[str, Any], Limits], tuple[Any, Sequence[str]]]
    """Reads a body: returns a request, and the names of ignored fields to be shown."""
    plan: Callable[[Limits, ServedModel, Any], Awaitable[GenerationPlan]]
    """Checks and tokenizes the request."""


_EMBEDDINGS = PooledKind(
    "embeddings", "Embed texts, as OpenAI's API does.", EmbeddingsRequest, parse_embeddings, plan_embeddings
)

POOLED: Mapping[str, PooledKind] = {"/v1/embeddings": _EMBEDDINGS}
