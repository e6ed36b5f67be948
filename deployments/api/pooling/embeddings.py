"""Plans and encodes POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

from deployments.api.base.errors import invalid
from deployments.api.base.field_checks import in_range
from deployments.api.generation.generation_plan import GenerationPlan
from deployments.api.output.response_encoder import ResponseContext, encoded_list
from deployments.api.pooling.plan import (
    NUMBER_CHARS,
    PooledEncoder,
    check_request,
    context_of,
    encode_all,
    numbered,
    pooled_plan,
    truncation,
)
from deployments.api.pooling.protocol import EmbeddingsRequest
from deployments.api.served.served_model import ServedModel
from deployments.config.limits import Limits
from engine.values.embedding import Vector, embeddings
from engine.values.pooling import Pooling

STEP_NUMBERS = 16_384
"""Numbers that are encoded in one step, which holds up other threads."""


async def plan_embeddings(limits: Limits, served: ServedModel, request: EmbeddingsRequest) -> GenerationPlan:
    """Check and tokenize a request, and plan what to compute. Raises `ApiError`."""
    check_request(served, request, limits, "embed")
    size = served.card.hidden_size
    in_range("dimensions", request.dimensions, 1, size)
    texts = [instructed(text, request.instruction) for text in request.input]
    add_special_tokens = request.add_special_tokens is not False

    def encode(text: str, most: int) -> list[int]:
        return served.codec.encode(text, add_special_tokens=add_special_tokens, max_tokens=most)

    prompts = await encode_all(limits, served, numbered("input", texts), encode, truncation(request, served))
    context = context_of("embd", served, request, prompts, (request.dimensions or size) * NUMBER_CHARS)
    encoder = EmbeddingsEncoder(
        context, request.dimensions, normalizes=_normalizes(request), as_base64=request.encoding_format == "base64"
    )
    return pooled_plan(served, request, encoder, Pooling(), "input")


def instructed(text: Any, instruction: str | None) -> Any:
    """Return a text to be embedded with its instruction, in the form that Qwen3-Embedding was trained with. Raises
    `ApiError` for token ids.
    """
    if instruction is None or not text:
        return text
    if not isinstance(text, str):
        raise invalid("instruction goes with texts, not with token ids; leave it out.", "instruction")
    return f"Instruct: {instruction}\nQuery:{text}"


def _normalizes(request: EmbeddingsRequest) -> bool:
    old, new = request.normalize, request.use_activation
    if old is not None and new is not None and old != new:
        raise invalid("normalize and use_activation differ; give one of them.", "use_activation")
    return (old if new is None else new) is not False


class EmbeddingsEncoder(PooledEncoder):
    """Encodes answers as lists of embeddings."""

    def __init__(
        self, context: ResponseContext, dimensions: int | None, *, normalizes: bool, as_base64: bool
    ) -> None:
        super().__init__(context)
        self._embeddings = partial(embeddings, dimensions=dimensions, normalizes=normalizes)
        self._as_base64 = as_base64

    def results(self, values: Sequence[Vector]) -> dict[str, Any]:
        """Return the embeddings."""
        vectors = self._embeddings(values)
        size = max(1, STEP_NUMBERS // max(1, vectors.shape[1]))
        data = encoded_list(list(enumerate(vectors)), self._entries, size)
        head = self.context
        return {"id": head.id, "object": "list", "created": head.created, "model": head.model, "data": data}

    def _entries(self, some: Sequence[tuple[int, Vector]]) -> list[dict[str, Any]]:
        return [
            {"object": "embedding", "index": index, "embedding": self._encoded(vector)} for index, vector in some
        ]

    def _encoded(self, vector: Vector) -> str | list[float]:
        if self._as_base64:
            return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")
        numbers: list[float] = vector.tolist()
        return numbers
