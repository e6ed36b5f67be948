"""The choices of one request. Its generations are opened together, read as they arrive, and always closed.

Chat and completions differ in how a choice is encoded, not in how it is generated:

    Generation 0 ─ StreamDelta ─▶ Choice 0 (text, stop strings) ─┐
    Generation 1 ─ StreamDelta ─▶ Choice 1                       ─┴─▶ Groups of ChoiceDeltas, each with its index

A beam search is one generation that yields all choices of its prompt, which end together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from msgspec import structs

from deployments.api.base.errors import ApiError, invalid
from deployments.api.output.choice import Choice, Group, PooledChoice
from deployments.api.output.generation_reader import TURN_OUTPUT, GenerationReader
from deployments.api.output.output_parser import OutputParser
from deployments.client.outgoing import TURN_TOKENS, sending_cost
from deployments.client.protocol import EngineClient, FoundPart, GenerateRequest, Generation
from deployments.client.timeline import Timeline
from engine.values.stream_delta import StreamDelta

logger = logging.getLogger(__name__)

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
        is_singly: bool = False,
    ) -> None:
        """A part is a request to an engine and the parsers of its outputs, of which a beam search has several.
        `Choice` explains `scores_only`, `stop_ids`, and `max_cached` for each prompt. With `pools`, prompts are
        pooled. With `is_singly`, each token makes a group of its own, even if tokens arrive together.
        """
        self._client = client
        self._requests = [request for request, _ in parts]
        self._idle_timeout_s = idle_timeout_s
        self._most = 1 if is_singly else TURN_OUTPUT
        self._readings: list[GenerationReader] = []
        self._opened: list[Generation] = []  # in the order of their acceptance, and some before all are accepted
        self._starts: list[asyncio.Task[Generation]] = []
        self._pumps: list[asyncio.Task[None]] = []
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
        return self._readings[0].generation if self._readings else None

    @property
    def timelines(self) -> list[Timeline]:
        """Each generation's timeline; empty until all are accepted."""
        return [reading.generation.timeline for reading in self._readings]

    async def open(self, found: Mapping[int, FoundPart] | None = None) -> None:
        """Send all requests; when one is refused, raise its error. `aclose` aborts those that were accepted.

        Those that are `found` run already, and are read from their first tokens.
        """
        found = found or {}
        if len(self._requests) == 1:
            self._begin_reading([await self._start(self._requests[0], found.get(0))])
            return
        size = 0
        for index, request in enumerate(self._requests):
            self._starts.append(asyncio.create_task(self._start(request, found.get(index))))
            size += sending_cost(len(request.prompt_ids))
            if size >= TURN_TOKENS:
                size = 0
                await asyncio.sleep(0)  # they begin, and other streams continue
        self._begin_reading(await asyncio.gather(*self._starts))

    def _begin_reading(self, generations: Sequence[Generation]) -> None:
        self._readings = [
            GenerationReader(generation, self.choices_of(index), self._idle_timeout_s)
            for index, generation in enumerate(generations)
        ]

    async def _start(self, request: GenerateRequest, found: FoundPart | None) -> Generation:
        client = self._client
        if found is None:
            generation = await client.generate(request)
        else:
            generation = await client.adopt(structs.replace(request, request_id=_first_id(found)), found)
        self._opened.append(generation)
        return generation

    def groups(self, note: Callable[[Group], None]) -> AsyncIterator[Group]:
        """Return an iterator over each choice's groups in order, the choices interleaved as they arrive. `note` is
        called with each of them when it is read.
        """
        return self._read(self._readings[0], note) if len(self._readings) == 1 else self._mixed(note)

    async def replayed(
        self, counts: Sequence[int | None], last: int, num_last: int
    ) -> AsyncIterator[tuple[Group, bool]]:
        """Read so many tokens of each choice again, and yield their groups; None reads nothing of a choice.

        The choice `last` ends with a group of `num_last` tokens, which comes with True. Raises `ApiError` 400 if
        the stream has not so many tokens.
        """
        for index, count in enumerate(counts):
            if count is None:
                continue
            choice, reading = self.choices[index], self._readings[index]  # A beam search is no stream.
            left = count - num_last if index == last else count
            while left:
                part = await _next_of(reading, min(left, self._most))
                left -= len(part.token_ids)
                yield choice.read(part), False
                await asyncio.sleep(0)  # other streams continue
            if index == last:
                part = StreamDelta("")
                while (left := num_last - len(part.token_ids)) and not part.finish_reason:
                    part.add(await _next_of(reading, left))
                group = choice.read(part)  # raises the failure, if one ended it
                if left:
                    raise _ahead()
                yield group, True
            if choice.finish_reason:
                await reading.end_early(choice)

    async def _mixed(self, note: Callable[[Group], None]) -> AsyncIterator[Group]:
        # One slot per choice: a slow consumer blocks the pumps, and generations merge their deltas.
        unfinished = len(self._readings)
        queue: asyncio.Queue[Group | Exception | None] = asyncio.Queue(unfinished)
        for index, reading in enumerate(self._readings):
            self._pumps.append(asyncio.create_task(self._pump(reading, queue)))
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

    async def _pump(self, reading: GenerationReader, queue: asyncio.Queue[Group | Exception | None]) -> None:
        try:
            async for group in self._read(reading):
                await queue.put(group)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    async def _read(
        self, reading: GenerationReader, note: Callable[[Group], None] = lambda _: None
    ) -> AsyncIterator[Group]:
        while (found := await reading.next(self._most)) is not None:
            choice, part = found
            group = choice.read(part)
            if choice.finish_reason and not part.finish_reason:
                await reading.end_early(choice)
            note(group)
            yield group
            if reading.parts:
                await asyncio.sleep(0)  # other streams continue

    async def aclose(self) -> None:
        """Abort the generations that have not finished. Idempotent."""
        await self._leave(lambda generation: generation.aclose())

    async def detach(self) -> None:
        """Stop reading. Resumable streams are generated further, for a while."""
        await self._leave(lambda generation: generation.detach())

    async def _leave(self, leave: Callable[[Generation], Awaitable[None]]) -> None:
        """Leave all generations, before anything is waited for, because the wait itself may be cancelled."""
        for reading in self._readings:
            reading.close()
        tasks: list[asyncio.Task[Any]] = [*self._starts, *self._pumps]
        for task in tasks:
            task.cancel()
        for generation in self._opened:
            try:
                await leave(generation)
            except Exception as error:
                logger.warning("closing a generation failed: %r", error)
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
            self._starts, self._pumps = [], []


def _first_id(found: FoundPart) -> str:
    """Return the id that a request was given here; those of its attempts at other replicas end in a number."""
    return found.part.request_id.partition("~")[0]


async def _next_of(reading: GenerationReader, most: int) -> StreamDelta:
    if (found := await reading.next(most)) is None:
        raise _ahead()
    return found[1]


def _ahead() -> ApiError:
    message = "Last-Event-ID is of an event that the stream, which has ended, does not have."
    return invalid(message, "Last-Event-ID", "ahead_of_stream")
