"""The choices of one request. Its generations are opened together, read as they arrive, and always closed.

Chat and completions differ in how a choice is encoded, not in how it is generated:

    Generation 0 ─ StreamDelta ─▶ Choice 0 (text, stop strings) ─┐
    Generation 1 ─ StreamDelta ─▶ Choice 1                       ─┴─▶ ChoiceDeltas, each with its index

A beam search is one generation that yields all choices of its prompt, which end together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any

from msgspec import structs

from deployments.api.base.errors import ApiError
from deployments.api.output.choice import Choice, ChoiceDelta, PooledChoice, failure_of
from deployments.api.output.output_parser import OutputParser
from deployments.client.outgoing import TURN_TOKENS, sending_cost
from deployments.client.protocol import EngineClient, GenerateRequest, Generation
from deployments.client.timeline import Timeline
from deployments.wire.deadlines.time_limit import TimeLimit
from engine.values.beam_search import Hypothesis
from engine.values.stream_delta import StreamDelta

logger = logging.getLogger(__name__)


_TURN_OUTPUT = 512
"""Most tokens of a choice that are parsed in one turn: more arrive together only when a reader was slow."""
_TURN_CHOICES = TURN_TOKENS // sending_cost(0)
"""Choices that begin to be read in one turn of the event loop."""


class Choices:
    """All choices of one request. Always close it, because open generations hold engine memory."""

    def __init__(
        self,
        client: EngineClient,
        parts: Sequence[tuple[GenerateRequest, Sequence[OutputParser]]],
        idle_timeout_s: float,
        *,
        scores_only: bool = False,
        max_cached: Callable[[Sequence[int]], int | None] = lambda _: None,
        stop_ids: Collection[int] = (),
        pools: bool = False,
    ) -> None:
        """A part is a request to an engine and the parsers of its outputs, of which a beam search has several.
        `Choice` explains `scores_only`, `stop_ids`, and `max_cached` for each prompt. With `pools`, prompts are
        pooled.
        """
        self._client = client
        self._requests = [request for request, _ in parts]
        self._idle_timeout_s = idle_timeout_s
        self._generations: list[Generation] = []
        self._opened: list[Generation] = []  # in the order of their acceptance, and some before all are accepted
        self._starts: list[asyncio.Task[Generation]] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._limits: list[TimeLimit] = []
        texts = [(text, max_cached(request.prompt_ids)) for request, texts in parts for text in texts]
        kind = PooledChoice if pools else Choice
        self.choices = [
            kind(index, text, scores_only=scores_only, max_cached=most, stop_ids=stop_ids)
            for index, (text, most) in enumerate(texts)
        ]

    def choices_of(self, generation: int) -> Sequence[Choice]:
        """Return the choices of one generation."""
        count = len(self.choices) // len(self._requests)
        return self.choices[generation * count : (generation + 1) * count]

    def num_cached(self, index: int) -> int:
        """Return how many of a choice's prompt tokens were cached; 0 for an echo, which no engine computed."""
        return self.choices[index].num_cached if self.choices else 0

    @property
    def are_over(self) -> bool:
        """Whether all choices have finished; true when there are none."""
        return all(choice.finish_reason for choice in self.choices)

    @property
    def first(self) -> Generation | None:
        """The first choice's generation; None until all are accepted."""
        return self._generations[0] if self._generations else None

    @property
    def timelines(self) -> list[Timeline]:
        """Each generation's timeline; empty until all are accepted."""
        return [generation.timeline for generation in self._generations]

    async def open(self) -> None:
        """Send all requests; when one is refused, raise its error. `aclose` aborts those that were accepted."""
        if len(self._requests) == 1:
            self._generations = [await self._start(self._requests[0])]
            return
        size = 0
        for request in self._requests:
            self._starts.append(asyncio.create_task(self._start(request)))
            size += sending_cost(len(request.prompt_ids))
            if size >= TURN_TOKENS:
                size = 0
                await asyncio.sleep(0)  # they begin, and other streams continue
        self._generations = list(await asyncio.gather(*self._starts))

    async def _start(self, request: GenerateRequest) -> Generation:
        generation = await self._client.generate(request)
        self._opened.append(generation)
        return generation

    def deltas(self, note: Callable[[ChoiceDelta], None]) -> AsyncIterator[ChoiceDelta]:
        """Return an iterator over each choice's deltas in order, the choices interleaved as they arrive. `note` is
        called with each of them when it is read.
        """
        return self._read(0, note) if len(self._generations) == 1 else self._mixed(note)

    async def _mixed(self, note: Callable[[ChoiceDelta], None]) -> AsyncIterator[ChoiceDelta]:
        # One slot per choice: a slow consumer blocks the pumps, and generations merge their deltas.
        count = unfinished = len(self._generations)
        queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(count)
        for index in range(count):
            self._pumps.append(asyncio.create_task(self._pump(index, queue)))
            if (index + 1) % _TURN_CHOICES == 0:
                await asyncio.sleep(0)  # they begin, and other streams continue
        while unfinished:
            item = await queue.get()
            if item is None:
                unfinished -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                note(item)
                yield item

    async def aclose(self) -> None:
        """Abort the generations that have not finished. Idempotent.

        All is aborted before anything is waited for, because the wait itself may be cancelled.
        """
        for limit in self._limits:
            limit.close()
        tasks: list[asyncio.Task[Any]] = [*self._starts, *self._pumps]
        for task in tasks:
            task.cancel()
        for generation in self._opened:
            try:
                await generation.aclose()
            except Exception as error:
                logger.warning("closing a generation failed: %r", error)
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
            self._starts, self._pumps = [], []

    def _too_late(self) -> ApiError:
        seconds = f"{self._idle_timeout_s:g} seconds (limits.idle_timeout_s)"
        return ApiError(504, f"The engine did not answer within {seconds}.", code="engine_timeout")

    async def _pump(self, index: int, queue: asyncio.Queue[ChoiceDelta | Exception | None]) -> None:
        try:
            async for delta in self._read(index):
                await queue.put(delta)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    async def _read(
        self, index: int, note: Callable[[ChoiceDelta], None] = lambda _: None
    ) -> AsyncIterator[ChoiceDelta]:
        generation, choices = self._generations[index], self.choices_of(index)
        choice, limit = choices[0], TimeLimit(self._idle_timeout_s)
        self._limits.append(limit)
        while True:
            try:
                with limit:
                    delta = await generation.__anext__()
            except StopAsyncIteration:
                raise failure_of(None) from None
            except TimeoutError:
                raise self._too_late() from None
            if delta.alternatives:
                for found, hypothesis in zip(choices, delta.alternatives, strict=False):
                    for taken in found.take(_delta_of(delta, hypothesis)):
                        note(taken)
                        yield taken
                return
            is_long = len(delta.token_ids) > _TURN_OUTPUT
            for part in delta.pieces(_TURN_OUTPUT) if is_long else (delta,):
                deltas = choice.take(part)
                if choice.finish_reason and not delta.finish_reason:  # its text ended it, unknown to the engine
                    await generation.aclose()
                for taken in deltas:
                    note(taken)
                    yield taken
                if choice.finish_reason:
                    return
                if is_long:
                    await asyncio.sleep(0)  # other streams continue


def _delta_of(end: StreamDelta, hypothesis: Hypothesis) -> StreamDelta:
    """Return the last delta of a beam search as that of one of its outputs."""
    token_ids = list(hypothesis.token_ids)
    return structs.replace(end, token_ids=token_ids, finish_reason=hypothesis.finish_reason, alternatives=None)
