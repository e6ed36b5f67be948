"""What a stream gained: the one type that a token travels in, from the engine's step to the reader of the answer.

    scheduler ─▶ outbox: merged until sent ─▶ wire ─▶ stream: merged until read ─▶ API

A delta is made for every token: as a struct it costs a seventh of what a frozen dataclass does, and as nothing
refers back to it, the garbage collector need not look at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.beam_search import Hypothesis
from engine.logprobs import PackedLogprobs, TokenLogprobs
from engine.structs import Struct

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went in one engine, in seconds, and what was done twice."""

    queue: float
    """From arrival to first admission."""
    prefill: float
    """From first admission to the first token."""
    decode: float
    """From the first token to the last so far; waits after a preemption included."""
    num_preemptions: int = 0
    num_recomputed: int = 0
    """Tokens whose KV was computed again: after a preemption, or here after another engine had computed it."""


class StreamDelta(Struct, frozen=True, gc=False):
    """News of one request: tokens, or its end, or both."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """New tokens. A stop token that ended the request is the last of them."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per new token when asked for, else empty."""
    finish_reason: FinishReason | None = None
    """Set on the last event of a request and only there."""
    num_cached: int = 0
    """Prompt tokens whose KV was found in the cache at admission."""
    error: str | None = None
    """Why the request was refused or failed, when `finish_reason` is "error"."""
    timings: Timings | None = None
    """With a request's first token, with the first one after each preemption, and with its end if it was admitted:
    whoever stops listening in between knows all but how long it decoded."""
    prompt_logprobs: PackedLogprobs | None = None
    """Of further prompt tokens, when asked for; all of them come before the first new token."""
    alternatives: tuple[Hypothesis, ...] = ()
    """With the end of a beam search, its only event: what it found, best first; `token_ids` are the first's."""
