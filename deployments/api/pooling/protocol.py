"""Typed models of the requests that generate nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from deployments.api.base.field_checks import at_most
from deployments.api.fields.field_values import are_ids, one_of, parse_service_tier, taking, whole, whole_ids
from deployments.api.fields.ignored import IgnoredFields, keep_known
from deployments.api.fields.protocol import CompletionRequest, Int, ServiceTier, TruncationSide, parse
from deployments.api.fields.strict_model import StrictModel
from deployments.config.limits import Limits

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"mm_processor_kwargs": ({},), "messages": ()}
_TEXTS = 'must be a text, or an array of texts or of objects {"text": "..."}'
_SIDES = ("documents", "queries", "items", "text_1", "text_2", "data_1", "data_2")
_EmbeddingFormat = Annotated[Literal["float", "base64"] | None, one_of("float", "base64")]
_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[int], Field(min_length=1)]
_Inputs = _Text | _Ids | Annotated[list[_Text], Field(min_length=1)] | Annotated[list[_Ids], Field(min_length=1)]


def _parse_input(value: object) -> object:
    """Return one or several inputs, each text or token ids, as a list of inputs."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("field", "must be text, token ids, or an array of either")
    if not value:
        raise PydanticCustomError("field", "is empty: it needs at least one text")
    if are_ids(value):
        return [value]
    value = [whole_ids(whole(one)) for one in value]
    if are_ids(value):
        return [value]
    if all(isinstance(one, str) for one in value) or all(isinstance(one, list) and are_ids(one) for one in value):
        return value
    raise PydanticCustomError("field", "must be text, token ids (integers), or an array of either, not mixed")


class PooledRequest(StrictModel):
    """Fields that all requests which generate nothing share."""

    unsupported = _UNSUPPORTED

    model: str
    instruction: str | None = None
    """Purpose of the search, in the form with which the model was trained."""
    truncate_prompt_tokens: Int | None = None
    """Most tokens of a prompt; of a longer one the last are taken. -1: as many as fit."""
    truncation_side: TruncationSide = None
    cache_salt: str | None = None
    priority: Int | None = None
    service_tier: Annotated[ServiceTier | None, taking(parse_service_tier, str | None)] = None
    prompt_cache_key: str | None = None
    include_timings: bool | None = None

    @classmethod
    def taken(cls, fields: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
        """See `StrictModel`. Only the text of a document is read."""
        for name in _SIDES:
            if isinstance(texts := fields.get(name), list):
                fields[name] = [
                    keep_known(text, {"text"}, {}, ignored, f"{name}.{index}.") if isinstance(text, dict) else text
                    for index, text in enumerate(texts)
                ]
        return fields

    def as_completion(self) -> CompletionRequest:
        """Return a request to generate with the same hints: it is sent to engines on the same way."""
        names = type(self).model_fields.keys() & CompletionRequest.model_fields.keys()
        return CompletionRequest(prompt=[""], **{name: getattr(self, name) for name in names})


class EmbeddingsRequest(PooledRequest):
    """Body of POST /v1/embeddings."""

    input: Annotated[list[Any], taking(_parse_input, _Inputs)]
    """A list of inputs once parsed, each a string or a list of token ids."""
    encoding_format: _EmbeddingFormat = None
    """As numbers, the default, or as base64 of their float32s, little endian."""
    dimensions: Int | None = None
    """How many of the first dimensions to return, for models that were trained for it; None: all."""
    add_special_tokens: bool | None = None
    """false: texts are tokenized without the special tokens that the tokenizer adds, at which some models are
    pooled."""
    normalize: bool | None = None
    """false: embeddings are not scaled to length 1."""
    use_activation: bool | None = None
    """vLLM's newer name for `normalize`."""


def _parse_texts(value: object) -> object:
    """Return one text or several, each also as an object with the field `text`, as a list of strings."""
    if value is None or isinstance(value, str):
        return None if value is None else [value]
    if not isinstance(value, list):
        raise PydanticCustomError("field", _TEXTS)
    if not value:
        raise PydanticCustomError("field", "is empty: it needs at least one text")
    texts = [one.get("text") if isinstance(one, dict) else one for one in value]
    if not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("field", _TEXTS)
    return texts


class TextObject(StrictModel):
    """A document, as /openapi.json describes it."""

    text: _Text


_Texts = _Text | Annotated[list[_Text | TextObject], Field(min_length=1)]
_AnyTexts = Annotated[list[str] | None, taking(_parse_texts, _Texts | None)]


class RerankRequest(PooledRequest):
    """Body of POST /v1/rerank."""

    query: Annotated[str, Field(json_schema_extra={"minLength": 1})]
    documents: Annotated[list[str], taking(_parse_texts, _Texts)]
    top_n: Int | None = None
    """Most documents to return; None and 0: all."""
    return_documents: bool | None = None
    """false: their texts are not returned."""


COUPLES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names of the two sides of pairs, of which a request has one couple."""


def _only(couple: Sequence[str]) -> JsonValue:
    """Return the schema of bodies with these sides and no others."""
    sides: dict[str, JsonValue] = {
        name: {"not": {"type": "null"}} if name in couple else {"type": "null"} for name in _SIDES
    }
    return {"required": [*couple], "properties": sides}


class ScoreRequest(PooledRequest):
    """Body of POST /v1/score: two sides of pairs, under one couple of names."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [_only(couple) for couple in COUPLES]})

    text_1: _AnyTexts = None
    text_2: _AnyTexts = None
    queries: _AnyTexts = None
    documents: _AnyTexts = None
    items: _AnyTexts = None
    data_1: _AnyTexts = None
    data_2: _AnyTexts = None


Kind = TypeVar("Kind", RerankRequest, ScoreRequest)


def parse_pairs(body: dict[str, Any], limits: Limits, kind: type[Kind]) -> tuple[Kind, Sequence[str]]:
    """Return a body of /v1/rerank or /v1/score, and the names of ignored fields. Raises `ApiError` 400."""
    for name in _SIDES:
        if isinstance(given := body.get(name), list):
            at_most(limits, "max_inputs", name, len(given), "texts")
    return parse(body, limits, kind)


def parse_embeddings(body: dict[str, Any], limits: Limits) -> tuple[EmbeddingsRequest, Sequence[str]]:
    """Return a body of /v1/embeddings, and the names of ignored fields to be shown. Raises `ApiError` 400."""
    given = body.get("input")
    if isinstance(given, list) and given and not isinstance(given[0], int):
        at_most(limits, "max_inputs", "input", len(given), "inputs")
    return parse(body, limits, EmbeddingsRequest)
