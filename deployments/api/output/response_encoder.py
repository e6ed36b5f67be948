"""Encodes the parts of answers that endpoints share, as JSON and events. Chunks are built from prebuilt bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Raw

from deployments.api.base.errors import ApiError
from deployments.api.output.choice import Choice, ChoiceDelta
from deployments.api.output.output_parser import ToolCallDelta

T = TypeVar("T")
encode_json = msgspec.json.Encoder().encode
PIECE = 256
"""Values of a long list that are encoded in one step."""
_LEFT_OUT = b"\0"
"""A placeholder, which is replaced afterwards: a byte that never occurs in JSON."""
_encode_without = msgspec.json.Encoder(enc_hook=lambda _: Raw(_LEFT_OUT)).encode
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt of a request as token ids, with the text to echo."""

    token_ids: list[int]
    echo: str | None = None
    """Text that precedes each of the prompt's choices; None echoes nothing."""


class AnswerName(NamedTuple):
    """The id of an answer, and when it was begun. An answer with the same name is the same wherever it is made."""

    id: str
    created: int
    """Unix seconds."""

    @classmethod
    def new(cls, prefix: str) -> AnswerName:
        """Name an answer that begins now; the id cannot be guessed."""
        return cls(f"{prefix}{token_hex(16)}", int(time.time()))


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Fields that are the same in every object sent for one request."""

    id: str
    created: int
    model: str
    prompts: Sequence[EncodedPrompt]
    num_choices: int
    """Number of choices per prompt; choice i belongs to prompt i // num_choices."""
    include_usage: bool
    """Whether a stream reports usage; a response that is not streamed always does."""
    continuous_usage: bool
    """Whether each chunk of a stream has the usage so far."""
    with_token_ids: bool
    include_timings: bool
    system_fingerprint: str | None = None
    """Names the model's files and the server's version."""
    num_result_chars: int = 0
    """Approximate characters of a prompt's computed values: the numbers of an embedding."""

    @classmethod
    def begin(
        cls, name: AnswerName | str, model: str, prompts: Sequence[EncodedPrompt], **options: Any
    ) -> ResponseContext:
        """Create the context of a response; of a new one if `name` is only the prefix of its id."""
        name = AnswerName.new(f"{name}-") if isinstance(name, str) else name
        return cls(name.id, name.created, model, prompts, **options)

    @property
    def name(self) -> AnswerName:
        """The answer's name."""
        return AnswerName(self.id, self.created)

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields that begin every object of this response."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }

    def prompt_of(self, choice: int) -> EncodedPrompt:
        """Return the prompt that a choice continues."""
        return self.prompts[choice // self.num_choices]

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens in all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_repeated(self) -> int:
        """Number of characters and token ids that the answer has of the prompts: repeated, or computed of them."""
        echoed = sum(len(prompt.echo or "") for prompt in self.prompts)
        repeated = echoed + (self.num_prompt_tokens if self.with_token_ids else 0)
        return repeated * self.num_choices + self.num_result_chars * len(self.prompts)

    def reports_ids(self, delta: ChoiceDelta) -> bool:
        """Whether a delta has token ids that the client asked for; they are sent even if they have no text yet."""
        return self.with_token_ids and bool(delta.token_ids)

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the usage object. A prompt and its cached tokens count once for any number of choices."""
        prompt_tokens = self.num_prompt_tokens
        completion_tokens = sum(choice.num_generated for choice in choices)
        reasoning_tokens = sum(choice.num_reasoning for choice in choices)
        cached = sum(choice.num_cached for choice in choices[:: max(len(choices) // len(self.prompts), 1)])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }


@dataclass(slots=True)
class CompleteChoice:
    """A choice's deltas joined, for a response that is not streamed."""

    text: list[str]
    token_ids: list[int]
    logprobs: list[Any]
    reasoning: list[str]
    calls: list[ToolCallDelta]
    """One merged delta per call."""
    finish_reason: str = "length"
    stop_reason: int | str | None = None

    @classmethod
    def of(cls, deltas: Iterable[ChoiceDelta]) -> CompleteChoice:
        """Join all deltas of one choice, given in order."""
        whole = cls([], [], [], [], [])
        for delta in deltas:
            whole.text.append(delta.text)
            whole.reasoning.append(delta.reasoning)
            for call in delta.calls:
                if call.name is not None:
                    whole.calls.append(replace(call))
                else:
                    whole.calls[call.index].arguments += call.arguments
            whole.token_ids += delta.token_ids
            whole.logprobs += delta.logprobs
            whole.finish_reason = delta.finish_reason or whole.finish_reason
            whole.stop_reason = delta.stop_reason
        return whole


class ResponseEncoder(Protocol):
    """Encodes the responses of one endpoint: a whole one, or a stream's events in the order of these methods."""

    context: ResponseContext
    takes_singly: bool
    """Whether its events depend on how tokens were merged, so that a resumable stream has to encode each
    individually."""

    def opening(self, index: int, num_cached: int) -> bytes:
        """Encode the events before a choice's first delta; empty if there are none. `num_cached` prompt tokens
        were cached.
        """

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Encode one delta as an event; the last one has the finish reason."""

    def end(self, extras: dict[str, Any]) -> bytes:
        """Encode the end of a stream; `extras` are `usage` and `timings`, if the context includes them."""

    def failure(self, error: ApiError, request_id: str) -> bytes:
        """Encode the end of a stream that fails after it has begun."""

    def whole(self, deltas: Sequence[Sequence[ChoiceDelta]], extras: dict[str, Any]) -> list[bytes]:
        """Encode a response that is not streamed from each choice's deltas, in pieces."""


class Pieces:
    """A long value as JSON, in pieces. They are never copied into one: that step would hold up other threads."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces


def in_pieces(value: dict[str, Any]) -> list[bytes]:
    """Encode an object in which some values are `Pieces`, at any depth: they stay unchanged."""
    short = _encode_without(value)
    if _LEFT_OUT not in short:
        return [short]
    found: list[Pieces] = []
    msgspec.json.Encoder(enc_hook=found.append).encode(value)
    first, *others = short.split(_LEFT_OUT)
    pieces = [first]
    for long, after in zip(found, others, strict=True):
        pieces += (*long.pieces, after)
    return pieces


def encode_whole(head: dict[str, Any], choices: Iterable[dict[str, Any]], extras: dict[str, Any]) -> list[bytes]:
    """Encode a response choice by choice: each may be long, and one step for all would hold up other threads."""
    each: Any = list(choices)
    if len(each) > 1:
        pieces = in_pieces(each[0])
        for choice in each[1:]:
            pieces += (b",", *in_pieces(choice))
        each = Pieces((b"[", *pieces, b"]"))
    return in_pieces({**head, "choices": each, **extras})


def encoded_list(
    values: Sequence[T], spell: Callable[[Sequence[T]], Sequence[Any]] = lambda piece: piece, size: int = PIECE
) -> Pieces:
    """Encode a list whose values may be large, such as log-probabilities, in steps of `size` that delay other
    threads by some milliseconds at most. `spell` returns the objects to encode for a few of them.
    """
    pieces = [b"["]
    for at in range(0, len(values), size):
        encoded = encode_json(spell(values[at : at + size]))[1:-1]
        pieces += (b",", encoded) if at else (encoded,)
    return Pieces((*pieces, b"]"))


class ChunkFraming:
    """The bytes around a chunk's choices, which are the same for all chunks of a stream.

    data: {"id":"...","object":"...","created":1,"model":"...","choices":[ ... ],"usage":null}
    ╰──────────────────────────── head ──────────────────────────────────╯     ╰─── tail ────╯
    """

    def __init__(self, context: ResponseContext, kind: str) -> None:
        self._head = b"data: " + encode_json(context.head(kind))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if context.include_usage else b"]}\n\n"
        self._num_prompt_tokens = context.num_prompt_tokens if context.continuous_usage else None
        self._num_generated = 0

    def count(self, num_generated: int) -> None:
        """Count tokens for the usage so far; they are in the next event."""
        self._num_generated += num_generated

    def choice(self, encoded: bytes) -> bytes:
        """Encode an event with one choice, given as JSON."""
        if self._num_prompt_tokens is None:
            return self._head + encoded + self._tail
        usage = b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n'
        counts = (self._num_prompt_tokens, self._num_generated, self._num_prompt_tokens + self._num_generated)
        return self._head + encoded + usage % counts

    def first(self, encoded: bytes, fields: dict[str, Any]) -> bytes:
        """Encode an event with one choice, and with `fields` next to the choices."""
        event, end = self.choice(encoded), len(self._head) + len(encoded) + 1
        return event[:end] + b"," + encode_json(fields)[1:-1] + event[end:]

    def end(self, extras: dict[str, Any]) -> bytes:
        """Encode the mark of a stream's end, after an event without choices if there are usage or timings."""
        return self._head + b"]," + encode_json(extras)[1:] + b"\n\n" + _DONE if extras else _DONE

    def failure(self, error: ApiError, request_id: str) -> bytes:
        """Encode the event by which a stream that has begun reports a failure."""
        return b"data: " + error.body(request_id) + b"\n\n"
