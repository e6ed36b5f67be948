"""How an answer is spelled: what chat and completions share. Streamed chunks are assembled from prebuilt bytes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from deployments.api.choices import Choice, ChoiceDelta
from deployments.api.output.output_parser import ToolCallDelta

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt of a request, and what of it goes into the answer."""

    token_ids: list[int]
    echo: str | None = None
    """Text that precedes each of its choices; None: it is not echoed."""


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What stays the same in everything that is sent about one request."""

    id: str
    created: int
    model: str
    prompts: Sequence[EncodedPrompt]
    num_choices: int
    """Per prompt; choice i belongs to prompt i // num_choices."""
    include_usage: bool
    """Whether a stream reports it; a whole answer always does."""
    with_token_ids: bool
    include_timings: bool

    @classmethod
    def begin(cls, prefix: str, model: str, prompts: Sequence[EncodedPrompt], **options: Any) -> ResponseContext:
        """A new answer with an id of its own."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, prompts, **options)

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that begin every object of this answer."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def prompt_of(self, choice: int) -> EncodedPrompt:
        """The prompt that a choice continues."""
        return self.prompts[choice // self.num_choices]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Each prompt counts once however many choices it has, and so do its cached tokens."""
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
    """A choice's deltas put together, for an answer that is not streamed."""

    text: list[str]
    token_ids: list[int]
    logprobs: list[Any]
    reasoning: list[str]
    calls: list[ToolCallDelta]
    """One per call."""
    finish_reason: str = "length"

    @classmethod
    def of(cls, deltas: Iterable[ChoiceDelta]) -> CompleteChoice:
        """All deltas of one choice, in order."""
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
        return whole


class ResponseEncoder(Protocol):
    """How one endpoint spells its answers."""

    context: ResponseContext

    def opening(self, index: int) -> bytes:
        """The event that precedes a choice's first delta; empty when there is none."""
        ...

    def delta(self, delta: ChoiceDelta) -> bytes:
        """One delta as an event; the last one says why it is the last."""
        ...

    def closing(self, extras: dict[str, Any]) -> bytes:
        """The event that ends a stream whose client asked for `usage` or `timings`."""
        ...

    def whole(self, deltas: Sequence[Sequence[ChoiceDelta]], extras: dict[str, Any]) -> bytes:
        """The answer in one piece; deltas by choice."""
        ...


class ChunkFraming:
    """The bytes around a chunk's choices, the same for all chunks of a stream.

    data: {"id":"...","object":"...","created":1,"model":"...","choices":[ ... ],"usage":null}
    ╰──────────────────────────── head ──────────────────────────────────╯     ╰─── tail ────╯
    """

    def __init__(self, context: ResponseContext, kind: str) -> None:
        self._head = b"data: " + encode_json(context.head(kind))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if context.include_usage else b"]}\n\n"

    def choice(self, encoded: bytes) -> bytes:
        """An event with one choice, given as JSON."""
        return self._head + encoded + self._tail

    def closing(self, extras: dict[str, Any]) -> bytes:
        """An event with no choices, and what is said of all of them."""
        return self._head + b"]," + encode_json(extras)[1:] + b"\n\n"


def error_event(body: bytes) -> bytes:
    """How a stream that has begun reports a failure."""
    return b"data: " + body + b"\n\n"
