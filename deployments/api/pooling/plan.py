"""Shared by the plans of requests that generate nothing: the model's task, the prompts, the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.api.base.errors import ApiError, internal, invalid
from deployments.api.base.field_checks import in_vocabulary
from deployments.api.base.off_loop import near_or_far
from deployments.api.conversation.encoder import TooManyTokens
from deployments.api.generation.generation_plan import GenerationPlan
from deployments.api.output.choice import ChoiceDelta
from deployments.api.output.response_encoder import EncodedPrompt, ResponseContext, in_pieces
from deployments.api.pooling.protocol import PooledRequest
from deployments.api.prompt.token_ids import Truncation, hopeless, refuse_hopeless
from deployments.api.sampling.parameters import check_hints
from deployments.api.served.context_room import check_in_context
from deployments.api.served.served_model import ServedModel
from deployments.config.limits import Limits
from engine.model_config.tasks import Task, not_served
from engine.values.embedding import Vector, values_of
from engine.values.pooling import Pooling
from engine.values.sampling_params import SamplingParams

NUMBER_CHARS = 22
"""Characters that a number takes in an answer, about."""
_TEXT_CHARS = 64
"""Characters whose tokenizing takes about as long as the other work for each text."""
_USAGE = ("prompt_tokens", "total_tokens", "prompt_tokens_details")


class Cut(Protocol):
    """Shortens prompts."""

    def of(self, ids: list[int]) -> list[int]:
        """Return a prompt, shortened."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text or token ids that a request gives, and where."""

    given: str | Sequence[int]
    param: str
    """The field, with the number of the text if it has several."""


def numbered(field: str, texts: Sequence[str | Sequence[int]]) -> list[Text]:
    """Name each text of a field; a single text has the field's name."""
    return [Text(text, f"{field}.{at}" if len(texts) > 1 else field) for at, text in enumerate(texts)]


def check_request(served: ServedModel, request: PooledRequest, limits: Limits, *tasks: Task) -> Task:
    """Return the first of `tasks` that the model is served for. Raises `ApiError` 400 if there is none, and for
    hints that are out of their bounds.
    """
    check_hints(request, limits, served.card)
    _check_repeated(request, limits)
    found = next((task for task in tasks if task in served.card.tasks), None)
    if found is None:
        wrong = not_served(tasks[0], served.card.tasks, is_encoder=served.card.is_encoder)
        raise invalid(f"The model {request.model} cannot do that: {wrong}.", "model", "model_not_supported")
    return found


def _check_repeated(request: PooledRequest, limits: Limits) -> None:
    """Raise `ApiError` 400 for a text that is repeated for many others, so that a small body becomes too large."""
    given = {name: getattr(request, name) for name in type(request).model_fields}
    count = max((len(value) for value in given.values() if isinstance(value, list)), default=1)
    for name, value in given.items():
        text = value[0] if isinstance(value, list) and len(value) == 1 else value
        if count > 1 and isinstance(text, str) and len(text) * count > limits.max_body_bytes:
            raise invalid(
                f"{name} is repeated for each of {count} texts, {len(text) * count} characters in all; at "
                f"most {limits.max_body_bytes} are allowed (limits.max_body_bytes). Send fewer texts per request.",
                name,
            )


def truncation(request: PooledRequest, served: ServedModel) -> Truncation | None:
    """Return how a request's prompts are shortened; None if they are not. They may take all of the context."""
    return Truncation.asked(request, served.card.max_model_len)


async def encode_all(
    limits: Limits,
    served: ServedModel,
    texts: Sequence[Text],
    encode: Callable[[str, int], list[int]],
    cut: Cut | None,
) -> list[EncodedPrompt]:
    """Return the texts' token ids, in a thread where they are many. Raises `ApiError` that names a text at fault.

    `encode` is given a text and the most tokens that it may have.
    """
    most = served.card.max_model_len if cut is None else limits.max_truncated_tokens

    def encoded(text: Text) -> EncodedPrompt:
        if not text.given:
            raise invalid(f"{text.param} is empty; it needs at least one token.", text.param)
        if isinstance(text.given, str):
            refuse_hopeless(served, len(text.given), text.param, most)
            try:
                ids = encode(text.given, most)
            except TooManyTokens as error:
                raise hopeless(served, error.least, text.param, most) from None
        else:
            ids = list(text.given)
            in_vocabulary(text.param, ids, served.card.vocab_size)
        ids = ids if cut is None else cut.of(ids)
        check_in_context(len(ids), served.card, text.param)
        return EncodedPrompt(ids)

    size = sum(_TEXT_CHARS + len(text.given) for text in texts)
    return await near_or_far(size, limits.inline_text_chars, lambda: [encoded(text) for text in texts])


def pooled_plan(
    served: ServedModel, request: PooledRequest, encoder: PooledEncoder, pooling: Pooling, count_field: str
) -> GenerationPlan:
    """Return the plan of a request whose prompts are pooled. `count_field` has so many of them."""
    sampling = SamplingParams(max_tokens=1, seed=0, pooling=pooling)
    return GenerationPlan(served, request.as_completion(), sampling, encoder, count_field=count_field)


def context_of(
    prefix: str, served: ServedModel, request: PooledRequest, prompts: Sequence[EncodedPrompt], num_chars: int
) -> ResponseContext:
    """Return the context of an answer in which the results of each prompt take about `num_chars` characters."""
    return ResponseContext.begin(
        prefix,
        served.card.id,
        prompts,
        num_choices=1,
        include_usage=True,
        continuous_usage=False,
        with_token_ids=False,
        include_timings=bool(request.include_timings),
        num_result_chars=num_chars,
    )


class PooledEncoder(ABC):
    """Encodes the answers of an endpoint that generates nothing: they are whole, never streams."""

    takes_singly = False

    def __init__(self, context: ResponseContext) -> None:
        self.context = context

    @abstractmethod
    def results(self, values: Sequence[Vector]) -> dict[str, Any]:
        """Return the fields of the answer that come of each prompt's values."""

    def whole(self, deltas: Sequence[Sequence[ChoiceDelta]], extras: dict[str, Any]) -> list[bytes]:
        """Encode an answer."""
        values = [values_of(self._pooled(own)) for own in deltas]
        usage = {name: extras["usage"][name] for name in _USAGE}
        return in_pieces({**self.results(values), **extras, "usage": usage})

    def _pooled(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        found = deltas[-1].pooled if deltas else None
        if found is None:
            raise internal(self.context.id)
        return found

    def opening(self, index: int, num_cached: int) -> bytes:
        """Streams have nothing of this."""
        raise self._no_stream()

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Streams have nothing of this."""
        raise self._no_stream()

    def end(self, extras: dict[str, Any]) -> bytes:
        """Streams have nothing of this."""
        raise self._no_stream()

    def failure(self, error: ApiError, request_id: str) -> bytes:
        """Streams have nothing of this."""
        raise self._no_stream()

    def _no_stream(self) -> ApiError:
        return internal(self.context.id)
