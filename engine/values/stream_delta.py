"""Stream deltas: the one type in which tokens travel, from the engine's step to the reader of the answer.

    scheduler ─▶ outbox: merged until sent ─▶ wire ─▶ stream: merged until read ─▶ API

A delta is made for every token. As a struct it costs a seventh of a frozen dataclass, and the garbage collector
can ignore it because it is in no reference cycle. The wire sends these structs unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from engine.base.structs import Struct, field
from engine.grammar.failure import GrammarErrorCode
from engine.values.beam_search import Hypothesis
from engine.values.logprobs import PackedLogprobs, TokenLogprobs, joined

FinishReason = Literal["stop", "length", "abort", "error"]
STEP_FAILED: Final = "step_failed"
"""Error code of a request whose step failed, because of it or of another request in the step."""


class Timings(Struct, frozen=True, gc=False, array_like=True):
    """A request's times by phase in one engine, in seconds, and its recomputed tokens."""

    queue: float
    """From arrival to first admission."""
    prefill: float
    """From first admission to the first token."""
    decode: float
    """From the first token to the latest, including waits after a preemption."""
    num_preemptions: int = 0
    num_recomputed: int = 0
    """Tokens whose KV was computed again: after a preemption, or here after another engine had computed it."""
    kv_pages_peak: int = 0
    """Most KV pages that it held at one time, including shared ones."""


class StreamDelta(Struct, gc=False, array_like=True, omit_defaults=True):
    """New tokens of one request, or its end, or both; an empty delta says that the request was accepted.

    Deltas that follow each other merge into one (`add`), and a merged one can be sent again in part (`since`).
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    """New tokens. A stop token that ended the request is the last of them."""
    start: int = 0
    """How many tokens of the stream come before these. Engines leave it 0, because their deltas come in order; the
    outbox sets it, so that a receiver notices lost or repeated tokens."""
    num_cached: int = 0
    """Prompt tokens whose KV was found in the cache at admission."""
    finish_reason: FinishReason | None = None
    """Set on the last delta of a request and only there."""
    timings: Timings | None = None
    """Comes with a request's first token, with the first one after each preemption, and with its end if it was
    admitted: a reader that stops in between knows all but how long the request decoded."""
    logprobs: list[TokenLogprobs] | None = None
    """One per new token; None when not asked for: an empty list would cost each token an allocation."""
    error: str | None = None
    """Why the request was refused or failed, when `finish_reason` is "error"."""
    prompt_logprobs: PackedLogprobs | None = None
    """Further prompt tokens' log-probabilities, when asked for; all of them come before the first new token."""
    alternatives: list[Hypothesis] | None = None
    """Set on the only delta of a beam search: its outputs, best first; `token_ids` are those of the first."""
    pooled: bytes | None = None
    """Set on the only delta of a pooled request: its result, in float32, little endian."""
    error_code: GrammarErrorCode | Literal["step_failed"] | None = None
    """Set where the request's grammar caused the error, so that no other engine can continue it; `error` then
    addresses the author of the grammar."""

    @property
    def end(self) -> int:
        """Number of the stream's tokens up to the end of these."""
        return self.start + len(self.token_ids)

    @property
    def is_empty(self) -> bool:
        """Whether it only says that the request runs."""
        return not self.token_ids and self.finish_reason is None and self.prompt_logprobs is None

    @property
    def text_ids(self) -> list[int]:
        """The tokens that become text: all but the stop token that ended the request."""
        return self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids

    def add(self, later: StreamDelta) -> None:
        """Append the delta that follows this one. O(tokens of `later`), without a prompt's log-probabilities."""
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += later.logprobs
        self.num_cached = later.num_cached
        self.timings = later.timings or self.timings
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = joined(self.prompt_logprobs, later.prompt_logprobs)
        if later.finish_reason is not None:
            self.finish_reason, self.error, self.error_code = later.finish_reason, later.error, later.error_code
            self.alternatives, self.pooled = later.alternatives, later.pooled

    def pieces(self, num_tokens: int) -> Iterator[StreamDelta]:
        """Yield parts of at most so many tokens that follow each other; the end, if this is one, with the last."""
        for first in range(0, len(self.token_ids), num_tokens):
            stop = first + num_tokens
            is_last = stop >= len(self.token_ids)
            piece = StreamDelta(
                self.request_id,
                self.token_ids[first:stop],
                self.start + first,
                self.num_cached,
                logprobs=None if self.logprobs is None else self.logprobs[first:stop],
                prompt_logprobs=None if first else self.prompt_logprobs,
            )
            if is_last:
                piece.finish_reason, piece.timings, piece.error = self.finish_reason, self.timings, self.error
                piece.alternatives, piece.pooled, piece.error_code = (
                    self.alternatives,
                    self.pooled,
                    self.error_code,
                )
            yield piece

    def since(self, num_tokens: int, num_prompt: int) -> StreamDelta:
        """Return the part that is new to a reader who has `num_tokens` tokens and the log-probabilities of
        `num_prompt` prompt tokens. The end, if this is one, is part of it.
        """
        skipped = max(0, num_tokens - self.start)
        scores = None if self.prompt_logprobs is None else self.prompt_logprobs.since(num_prompt)
        return StreamDelta(
            self.request_id,
            self.token_ids[skipped:],
            self.start + skipped,
            self.num_cached,
            self.finish_reason,
            self.timings,
            None if self.logprobs is None else self.logprobs[skipped:],
            self.error,
            scores,
            self.alternatives,
            self.pooled,
            self.error_code,
        )
