"""Scores pairs of texts: judged by a model that was trained for it, or compared by their embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployments.api.errors import invalid
from deployments.api.output.response_encoder import EncodedPrompt
from deployments.api.pooling.embeddings import instructed
from deployments.api.pooling.judge import CutWithin, Judge, asked
from deployments.api.pooling.plan import Text, check_request, encode_all, truncation
from deployments.api.pooling.protocol import PooledRequest
from deployments.api.service import ServedModel
from deployments.config.limits import Limits
from engine.embedding import Vector, embeddings
from engine.pooling import Pooling

Pair = tuple[Text, Text]
"""A query and a document."""


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """What is computed for pairs, and their scores."""

    prompts: Sequence[EncodedPrompt]
    pooling: Pooling
    scores: Callable[[Sequence[Vector]], list[float]]
    """Maps the prompts' values to a score for each pair."""


async def score_pairs(
    limits: Limits, served: ServedModel, request: PooledRequest, pairs: Sequence[Pair]
) -> ScoredPairs:
    """Plan what scores the pairs. Raises `ApiError`."""
    task = check_request(served, request, limits, "rerank", "embed")
    for text in {text.param: text for pair in pairs for text in pair}.values():
        if not text.given:
            raise invalid(f"{text.param} is empty; it needs at least one token.", text.param)
    plan = _judged if task == "rerank" else _compared
    return await plan(limits, served, request, pairs)


async def _judged(
    limits: Limits, served: ServedModel, request: PooledRequest, pairs: Sequence[Pair]
) -> ScoredPairs:
    judge = Judge.of(served.codec, served.card.id)
    texts = [
        Text(asked(str(query.given), str(document.given), request.instruction), document.param)
        for query, document in pairs
    ]
    cut = truncation(request, served)
    within = None if cut is None else CutWithin(cut.num_tokens, len(judge.end))
    if within is not None and within.num_tokens <= judge.num_fixed:
        raise invalid(
            f"truncate_prompt_tokens must be above {judge.num_fixed}, the tokens of the prompt besides query and "
            f"document, got {within.num_tokens}.",
            "truncate_prompt_tokens",
        )
    prompts = await encode_all(limits, served, texts, judge.encode, within)
    return ScoredPairs(prompts, Pooling(judge.answers), lambda values: [float(found[0]) for found in values])


async def _compared(
    limits: Limits, served: ServedModel, request: PooledRequest, pairs: Sequence[Pair]
) -> ScoredPairs:
    """Each text is embedded once, however many pairs it is in."""
    queries = [Text(instructed(query.given, request.instruction), query.param) for query, _ in pairs]
    documents = [document for _, document in pairs]
    texts = list({text.given: text for text in [*queries, *documents]}.values())
    places = {text.given: place for place, text in enumerate(texts)}

    def encode(text: str, most: int) -> list[int]:
        return served.codec.encode(text, max_tokens=most)

    def scores(values: Sequence[Vector]) -> list[float]:
        vectors = embeddings(values)
        first = vectors[[places[text.given] for text in queries]]
        second = vectors[[places[text.given] for text in documents]]
        return [float(score) for score in (first * second).sum(axis=1)]

    prompts = await encode_all(limits, served, texts, encode, truncation(request, served))
    return ScoredPairs(prompts, Pooling(), scores)
