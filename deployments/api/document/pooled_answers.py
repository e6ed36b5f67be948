"""The types of answers to requests that generate nothing, as /openapi.json describes them: see `answers.py`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from deployments.api.document.answers import CachedTokens
from deployments.api.record.timings import RequestTimings


class Embedding(Struct):
    """One embedding: numbers, or with `encoding_format: base64` the bytes of their 32-bit floats."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PromptUsage(Struct):
    """Tokens of a request that generates none."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Embeddings(Struct):
    """Embeddings of texts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PromptUsage
    timings: RequestTimings | UnsetType = UNSET


class RankedText(Struct):
    """A ranked document, if the request asked for documents."""

    text: str


class RankedDocument(Struct):
    """How well a document answers the query."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(Struct):
    """Documents in the order of their scores, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage
    timings: RequestTimings | UnsetType = UNSET


class PairScore(Struct):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class PairScores(Struct):
    """The scores of pairs of texts, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PromptUsage
    timings: RequestTimings | UnsetType = UNSET
