"""One choice while it is generated: its deltas, from the tokens of a stream to text, calls and logprobs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from msgspec import Struct, structs

from deployments.api.base.errors import RETRY_AFTER_S, ApiError, invalid
from deployments.api.output.output_parser import OutputParser, ToolCallDelta
from deployments.api.output.spelled_text import SpelledText
from engine.values.logprobs import PackedLogprobs, TokenLogprobs
from engine.values.stream_delta import FinishReason, StreamDelta

logger = logging.getLogger(__name__)

_ADVICE = {
    "grammar_dead_end": "Change the grammar or schema so that each text that it lets begin can be completed.",
    "grammar_too_complex": "Simplify the grammar or schema.",
}


class ChoiceDelta(Struct, frozen=True, gc=False):
    """The part of one choice that one delta of a stream adds."""

    index: int
    text: str
    token_ids: Sequence[int]
    """The tokens behind the text, and the stop token that ended it; without those of a stop string."""
    logprobs: Sequence[TokenLogprobs]
    """One per token id when requested, else empty. With a text, they are those of the tokens that spell it
    (`spelled_text`)."""
    finish_reason: str | None = None
    """"stop", "length" or "tool_calls" on the choice's last delta."""
    prompt_logprobs: PackedLogprobs | None = None
    """Log-probabilities of further prompt tokens, which come before all text."""
    reasoning: str = ""
    """Reasoning added, which precedes the text."""
    calls: Sequence[ToolCallDelta] = ()
    """Parts of tool calls added."""
    stop_string: str | None = None
    """The stop string that ended the choice, on its last delta."""
    stop_token: int | None = None
    """The token among `stop_token_ids` that ended it, unless it is the model's own end."""
    pooled: bytes | None = None
    """With the end of a prompt that was pooled, its only delta: the values, as in `StreamDelta`."""

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or stop token that ended the choice, as in vLLM; None if the model ended it."""
        return self.stop_token if self.stop_string is None else self.stop_string

    def joined(self, later: ChoiceDelta) -> ChoiceDelta | None:
        """Return this and the delta that follows it as one; None if tokens would come with a text not theirs."""
        if bool(self.text) != bool(later.text) or bool(self.logprobs) != bool(later.logprobs):
            return None
        if self.calls or later.calls or (self.text and later.reasoning):
            return None
        return structs.replace(
            later,
            text=self.text + later.text,
            token_ids=[*self.token_ids, *later.token_ids],
            logprobs=[*self.logprobs, *later.logprobs],
            prompt_logprobs=self.prompt_logprobs,
            reasoning=self.reasoning + later.reasoning,
        )

    @property
    def has_content(self) -> bool:
        """Whether the delta has anything that is sent to the client."""
        return bool(self.text or self.logprobs or self.finish_reason or self.reasoning or self.calls)


class Group(Struct, frozen=True, gc=False):
    """The deltas that some tokens of a choice added together. Their events are sent together."""

    index: int
    token_ids: Sequence[int]
    """The tokens that were read, up to the one that ended the choice."""
    deltas: Sequence[ChoiceDelta]
    finish_reason: str | None = None
    """That of the choice, on its last group."""


class Choice:
    """One choice while it is generated."""

    def __init__(
        self,
        index: int,
        text: OutputParser,
        *,
        scores_only: bool = False,
        max_cached: int | None = None,
        stop_ids: Collection[int] = (),
    ) -> None:
        """With `scores_only` the choice stays empty: the one token that an engine always generates is dropped.
        `max_cached` bounds the cached tokens that are reported; None reports all. `stop_ids` are the tokens that
        are reported when they end the choice.
        """
        self.index = index
        self.num_generated = 0
        self.num_cached = 0
        """Number of prompt tokens with KV in a cache, up to the number that the client may know."""
        self.finish_reason: str | None = None
        self._sum_logprobs = 0.0
        self._text, self._scores_only = text, scores_only
        self._max_cached, self._stop_ids = max_cached, stop_ids

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens, a stop token included, when requested; 0 for an empty choice."""
        return self._sum_logprobs / max(self.num_generated, 1)

    @property
    def tells_cache(self) -> bool:
        """Whether the client may know the full number of cached tokens."""
        return self._max_cached is None

    def read(self, delta: StreamDelta) -> Group:
        """Do the same as `take`, and return the tokens too that belong to the choice."""
        before, token_ids = self.num_generated, delta.token_ids
        deltas = self.take(delta)
        num_read = self.num_generated - before
        if num_read < len(token_ids):
            token_ids = token_ids[:num_read]
        return Group(self.index, token_ids, deltas, self.finish_reason)

    def take(self, delta: StreamDelta) -> list[ChoiceDelta]:
        """Apply a delta and return what it adds: one delta, or with log-probabilities several, whose tokens spell
        their texts. Raises `ApiError` when the engine failed.
        """
        if self._text.spelled is None or not (delta.token_ids or delta.finish_reason):
            return [self._take(delta)]
        taken: list[ChoiceDelta] = []
        for part in delta.pieces(1) if delta.token_ids else (delta,):
            for piece in self._pieces(self._take(part), self._text.spelled):
                if taken and (joined := taken[-1].joined(piece)) is not None:
                    taken[-1] = joined
                else:
                    taken.append(piece)
            if self.finish_reason:  # Tokens after a stop string do not belong to the answer.
                break
        return taken

    def _pieces(self, whole: ChoiceDelta, spelled: SpelledText) -> list[ChoiceDelta]:
        """Return a delta of at most one token in pieces, so that the tokens of each piece spell its text."""
        is_last = whole.finish_reason is not None
        is_settled = is_last or bool(whole.reasoning or whole.calls)
        pieces = spelled.add(whole.logprobs, whole.text, is_settled=is_settled, is_last=is_last)
        if whole.calls:  # They are placed within the text of their delta, which stays undivided.
            text, tokens = "".join(text for text, _ in pieces), [token for _, own in pieces for token in own]
            pieces = [(text, []), ("", tokens)]
        elif not pieces and (is_last or whole.reasoning or whole.prompt_logprobs):
            pieces = [("", [])]
        deltas = [
            ChoiceDelta(self.index, text, [token.token_id for token in tokens], tokens) for text, tokens in pieces
        ]
        if deltas:
            deltas[0] = structs.replace(
                deltas[0],
                prompt_logprobs=whole.prompt_logprobs,
                reasoning=whole.reasoning,
                calls=whole.calls,
            )
            deltas[-1] = structs.replace(
                deltas[-1],
                finish_reason=whole.finish_reason,
                stop_string=whole.stop_string,
                stop_token=whole.stop_token,
            )
        return deltas

    def _take(self, delta: StreamDelta) -> ChoiceDelta:
        if delta.finish_reason in ("error", "abort"):
            raise failure_of(delta)
        found = delta.num_cached if self._max_cached is None else min(delta.num_cached, self._max_cached)
        self.num_cached = max(self.num_cached, found)
        if self._scores_only:
            delta = _without_output(delta)
        before, token_ids = self._text.num_tokens, delta.token_ids
        text_ids = token_ids if self._text.includes_stop else delta.text_ids
        said = self._text.push(text_ids, is_last=delta.finish_reason is not None)
        finish_reason: str | None = delta.finish_reason
        stop_token: int | None = None
        if self._text.stopped:
            token_ids, finish_reason = token_ids[: self._text.num_tokens - before], "stop"
        elif finish_reason == "stop" and token_ids and token_ids[-1] in self._stop_ids:
            stop_token = token_ids[-1]
        if finish_reason == "stop" and self._text.is_call:
            finish_reason = "tool_calls"
        self.num_generated += len(token_ids)
        logprobs: Sequence[TokenLogprobs] = delta.logprobs or ()
        if logprobs:
            logprobs = logprobs[: len(token_ids)]
            self._sum_logprobs += sum(at.logprob for at in logprobs)
        self.finish_reason = finish_reason
        return ChoiceDelta(
            self.index,
            said.text,
            token_ids,
            logprobs,
            finish_reason,
            delta.prompt_logprobs,
            said.reasoning,
            said.calls,
            self._text.stop_string if self._text.stopped else None,
            stop_token,
        )

    @property
    def num_reasoning(self) -> int:
        """Number of generated tokens that are reasoning."""
        return self._text.num_reasoning


class PooledChoice(Choice):
    """A prompt that is pooled: nothing is generated."""

    def take(self, delta: StreamDelta) -> list[ChoiceDelta]:
        """Apply its only delta. Raises `ApiError` when the engine failed."""
        if delta.finish_reason in ("error", "abort"):
            raise failure_of(delta)
        self.num_cached = delta.num_cached if self._max_cached is None else min(delta.num_cached, self._max_cached)
        self.finish_reason = delta.finish_reason
        return [ChoiceDelta(self.index, "", (), (), delta.finish_reason, pooled=delta.pooled)]


def _without_output(delta: StreamDelta) -> StreamDelta:
    """Return a delta with only the prompt's part of `delta`, and its end."""
    ends: FinishReason | None = "length" if delta.finish_reason else None
    return structs.replace(delta, token_ids=[], logprobs=None, finish_reason=ends)


def failure_of(end: StreamDelta | None) -> ApiError:
    """Log the failure, and return an error without its details; an abort's suggests a retry.

    The error does name a fault of the client's grammar.
    """
    if end is not None and (advice := _ADVICE.get(end.error_code or "")):
        return invalid(f"The answer cannot continue: {end.error}. {advice}", code=end.error_code)
    if end is None or end.finish_reason == "error":
        logger.error("generation failed: %s", end.error if end else "it ended without a finish reason")
        return ApiError(500, "The engine failed on this request.", code="engine_error")
    headers = {"retry-after": f"{RETRY_AFTER_S:.0f}"}
    return ApiError(503, "The engine dropped this request.", code="aborted", headers=headers)
