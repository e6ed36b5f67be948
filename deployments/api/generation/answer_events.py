"""Encodes the events of one stream, with ids where its client can continue it, and encodes them again up to the
position at which a client continues.

    tokens before the position ─▶ groups ─▶ events, not sent
    the group of the position  ─▶ events: the first are dropped ─▶ the rest, then all later ones
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from deployments.api.base.off_loop import off_loop
from deployments.api.generation.generation_plan import GenerationPlan
from deployments.api.output.choice import Group
from deployments.api.output.choices import Choices
from deployments.api.streams.event_ids import EventIds, after
from deployments.api.streams.found import stream_differs
from deployments.api.streams.position import StreamPosition
from deployments.config.limits import Limits

T = TypeVar("T")


class AnswerEvents:
    """The events of one stream."""

    def __init__(
        self,
        limits: Limits,
        plan: GenerationPlan,
        choices: Choices,
        ids: EventIds | None = None,
        position: StreamPosition | None = None,
    ) -> None:
        """None for `ids`: the events have none. The client has the events up to `position`."""
        self._limits, self._encoder, self._choices = limits, plan.encoder, choices
        self._num_top = plan.sampling.logprobs
        self._num_scores = 0 if plan.scores is None else plan.scores.num_entries
        self._ids, self._position = ids, position
        self._opened: set[int] = set()

    async def of(self, group: Group) -> bytes:
        """Encode the events of a group, after the choice's opening where it is the first."""
        index, events = group.index, b""
        if index not in self._opened:
            self._opened.add(index)
            num_cached = self._choices.num_cached(index)
            events = await self.encode(partial(self._encoder.opening, index, num_cached))
        for delta in group.deltas:
            if self._num_top is None:
                events += self._encoder.delta(delta)
            else:
                encode = partial(self._encoder.delta, delta)
                repeats = delta.finish_reason is not None or bool(delta.calls)
                is_long = len(delta.logprobs) * (self._num_top + 1) > self._limits.inline_logprobs
                events += await self.encode(encode) if repeats or is_long else encode()
        if self._ids is None:
            return events
        self._ids.read(index, group.token_ids)
        return self._ids.named(events, index, len(group.token_ids)) if events else b""

    async def end(self, extras: dict[str, Any]) -> bytes:
        """Encode the end of the stream, which may repeat all log-probabilities of the answer."""
        return await self._encode_end(partial(self._encoder.end, extras))

    async def failure(self, encode: Callable[[], bytes]) -> bytes:
        """Encode a failure. It has no id, so that a client which then reconnects continues where it was."""
        return await self._encode_end(encode)

    async def encode(self, encode: Callable[[], T]) -> T:
        """Encode a large part of the answer, in a thread when many log-probabilities or prompts make it slow."""
        num_logprobs = self._num_scores
        if self._num_top is not None:
            num_logprobs += (self._num_top + 1) * sum(choice.num_generated for choice in self._choices.choices)
        is_short = num_logprobs <= self._limits.inline_logprobs
        is_small = self._encoder.context.num_repeated <= self._limits.inline_body_bytes
        return encode() if is_short and is_small else await off_loop(encode)

    async def _encode_end(self, encode: Callable[[], bytes]) -> bytes:
        return encode() if self._num_top is None else await self.encode(encode)

    # --- a stream that is continued ------------------------------------------------------------------------

    async def replayed(self, position: StreamPosition) -> bytes:
        """Encode the stream up to a position again; return the new events of the group in which it is.

        Raises `ApiError` if the position is not one of this stream.
        """
        assert self._ids is not None
        new: bytes | None = b""
        replayed = self._choices.replayed(position.counts, position.choice, position.num_last)
        async for group, is_last in replayed:
            events = await self.of(group)
            if is_last:
                new = after(events, position.event)
        if new is None or not self._ids.is_at(position):
            raise stream_differs()
        return new

    def ended(self, events: bytes) -> bytes:
        """Return the events that end the stream with their ids, without those that the client has. Raises
        `ApiError` if it has more.
        """
        if self._ids is None or not events:
            return events
        events, position = self._ids.named(events, len(self._choices.choices), 0), self._position
        if position is None or not position.at_end:
            return events
        if (new := after(events, position.event)) is None:
            raise stream_differs()
        return new
