"""Reads one generation in parts, each of one choice and of as many tokens as its reader takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import structs

from deployments.api.base.errors import ApiError
from deployments.api.output.choice import Choice, failure_of
from deployments.client.protocol import Generation
from deployments.wire.deadlines.time_limit import TimeLimit
from engine.values.beam_search import Hypothesis
from engine.values.stream_delta import StreamDelta

TURN_OUTPUT = 512
"""Most tokens of a choice that are parsed in one turn: more arrive together only when a reader was slow."""
_UNDIVIDED = (None, "stop", "length")
"""Finish reasons of deltas whose tokens and end are one part. Those of a failure are two, as it raises."""


class GenerationReader:
    """One generation while it is read."""

    def __init__(self, generation: Generation, choices: Sequence[Choice], idle_timeout_s: float) -> None:
        """`choices` are those of the generation: several of a beam search, which end together."""
        self.generation = generation
        self._choices = choices
        self._idle_timeout_s, self._limit = idle_timeout_s, TimeLimit(idle_timeout_s)
        self.parts: deque[tuple[Choice, StreamDelta]] = deque()
        """Parts that can be read without waiting."""
        self._is_complete = False

    async def next(self, most: int) -> tuple[Choice, StreamDelta] | None:
        """Return a choice and its next tokens, at most so many; None when all choices are over. Waits if there are
        none. Raises `ApiError` when the generation fails, after all tokens before that.
        """
        while not self.parts:
            if self._is_complete or self._choices[0].finish_reason:
                return None
            try:
                with self._limit:
                    delta = await self.generation.__anext__()
            except StopAsyncIteration:
                raise failure_of(None) from None
            except TimeoutError:
                raise self._too_late() from None
            if len(delta.token_ids) <= most and delta.finish_reason in _UNDIVIDED and delta.alternatives is None:
                return self._choices[0], delta
            self._add(delta)
        choice, delta = self.parts.popleft()
        if len(delta.token_ids) <= most:
            return choice, delta
        first, rest = _split(delta, most)
        self.parts.appendleft((choice, rest))
        return choice, first

    async def end_early(self, choice: Choice) -> None:
        """Abort the generation, if its text ended the choice, unknown to the engine. Later tokens are ignored."""
        while self.parts and self.parts[0][0] is choice:
            self.parts.popleft()
        if not self._is_complete:
            await self.generation.aclose()

    def close(self) -> None:
        """Stop the clock. Idempotent."""
        self._limit.close()

    def _too_late(self) -> ApiError:
        seconds = f"{self._idle_timeout_s:g} seconds (limits.idle_timeout_s)"
        return ApiError(504, f"The engine did not answer within {seconds}.", code="engine_timeout")

    def _add(self, delta: StreamDelta) -> None:
        choice, num_tokens = self._choices[0], len(delta.token_ids)
        if delta.alternatives:
            pairs = zip(self._choices, delta.alternatives, strict=False)
            self.parts.extend((choice, _delta_of(delta, hypothesis)) for choice, hypothesis in pairs)
            self._is_complete = True
        elif num_tokens and delta.finish_reason in ("error", "abort"):
            tokens, end = _split(delta, num_tokens)
            self._add(tokens)
            self._add(end)
        elif num_tokens > TURN_OUTPUT:
            self.parts.extend((choice, piece) for piece in delta.pieces(TURN_OUTPUT))
        else:
            self.parts.append((choice, delta))


def _split(delta: StreamDelta, num_tokens: int) -> tuple[StreamDelta, StreamDelta]:
    """Return a delta's first tokens, and the rest with its end."""
    logprobs = delta.logprobs
    first = structs.replace(
        delta,
        token_ids=delta.token_ids[:num_tokens],
        logprobs=None if logprobs is None else logprobs[:num_tokens],
        finish_reason=None,
        error=None,
        error_code=None,
    )
    rest = structs.replace(
        delta,
        token_ids=delta.token_ids[num_tokens:],
        start=delta.start + num_tokens,
        logprobs=None if logprobs is None else logprobs[num_tokens:],
        prompt_logprobs=None,
    )
    return first, rest


def _delta_of(end: StreamDelta, hypothesis: Hypothesis) -> StreamDelta:
    """Return the last delta of a beam search as that of one of its outputs."""
    token_ids = list(hypothesis.token_ids)
    return structs.replace(end, token_ids=token_ids, finish_reason=hypothesis.finish_reason, alternatives=None)
