"""Scores pairs of texts: judged by a model that was trained for it, or compared by their embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployments.api.base.errors import invalid
from deployments.api.conversation.encoder import TooManyTokens
from deployments.api.output.response_encoder import EncodedPrompt
from deployments.api.pooling.cross import CrossPrompt
from deployments.api.pooling.embeddings import instructed
from deployments.api.pooling.judge import CutWithin, Judge, asked
from deployments.api.pooling.plan import Text, check_request, encode_all, truncation
from deployments.api.pooling.protocol import PooledRequest
from deployments.api.prompt.token_ids import hopeless
from deployments.api.served.served_model import ServedModel
from deployments.config.limits import Limits
from engine.values.embedding import Vector, embeddings
from engine.values.pooling import Pooling

Pair = tuple[Text, Text]
"""A query and a document."""


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """The prompts that are computed for pairs, and the pairs' scores."""

    prompts: Sequence[EncodedPrompt]
    pooling: Pooling
    scores: Callable[[Sequence[Vector]], list[float]]
    """Maps the prompts' values to a score for each pair."""


async def score_pairs(
    limits: Limits, served: ServedModel, request: PooledRequest, pairs: Sequence[Pair]
) -> ScoredPairs:
    """Plan the prompts that score the pairs. Raises `ApiError`."""
    task = check_request(served, request, limits, "rerank", "embed")
    for text in {text.param: text for pair in pairs for text in pair}.values():
        if not text.given:
            raise invalid(f"{text.param} is empty; it needs at least one token.", text.param)
    if task == "embed":
        return await _compared(limits, served, request, pairs)
    return await (_crossed if served.card.is_encoder else _judged)(limits, served, request, pairs)


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
    _check_cut(within, judge.num_fixed, "query and document")
    prompts = await encode_all(limits, served, texts, judge.encode, within)
    return ScoredPairs(prompts, Pooling(judge.answers), _first_values)


async def _crossed(
    limits: Limits, served: ServedModel, request: PooledRequest, pairs: Sequence[Pair]
) -> ScoredPairs:
    if request.instruction is not None:
        raise invalid(f"The model {request.model} takes no instruction; leave it out.", "instruction")
    prompts: list[EncodedPrompt | None] = [None] * len(pairs)
    places: dict[str | Sequence[int], list[int]] = {}
    for place, (query, _) in enumerate(pairs):
        places.setdefault(query.given, []).append(place)
    cut = truncation(request, served)
    most = served.card.max_model_len if cut is None else limits.max_truncated_tokens
    for own in places.values():
        query = pairs[own[0]][0]
        try:
            cross = CrossPrompt.of(served.codec, str(query.given), most)
        except TooManyTokens as error:
            raise hopeless(served, error.least, query.param, most) from None
        within = None if cut is None else CutWithin(cut.num_tokens, len(cross.end))
        _check_cut(within, cross.num_fixed, "the document")
        documents = [pairs[place][1] for place in own]
        encoded = await encode_all(limits, served, documents, cross.encode, within)
        for place, prompt in zip(own, encoded, strict=True):
            prompts[place] = prompt
    found = [prompt for prompt in prompts if prompt is not None]
    return ScoredPairs(found, Pooling(by_head=True), _first_values)


def _check_cut(cut: CutWithin | None, num_fixed: int, fixed: str) -> None:
    """Raise `ApiError` for a bound so low that no part of the client's texts is left."""
    if cut is not None and cut.num_tokens <= num_fixed:
        raise invalid(
            f"truncate_prompt_tokens must be above {num_fixed}, the tokens of the prompt besides {fixed}, got "
            f"{cut.num_tokens}.",
            "truncate_prompt_tokens",
        )


def _first_values(values: Sequence[Vector]) -> list[float]:
    return [float(found[0]) for found in values]


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
