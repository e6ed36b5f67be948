"""Requests with known answers, which must be the same while the cluster is disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import httpx

from benchmarks.chaos_load import Answer, Ask, Outcome, prepare, put
from tests.support.waiting import PATIENCE_S

Known = list[tuple[Ask, Answer]]


def client_of(url: str) -> httpx.AsyncClient:
    """Return a client that leaves a connection only if it breaks, however slow the machine is."""
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None))


async def answers_under(
    url: str, known: Known, disturb: Callable[[], Awaitable[None]], again: str | None = None
) -> list[Outcome]:
    """Ask all at once, and disturb the cluster when each stream has begun; on a slow machine, some have ended.

    With `again`, the clients of streams that break off continue them at that URL.
    """
    is_resumable = again is not None
    async with client_of(url) as client:
        outcomes = [Outcome(ask, is_resumable=is_resumable) for ask, _ in known]
        tasks = [asyncio.create_task(put(client, outcome.ask, outcome, again)) for outcome in outcomes]
        streams = [outcome for outcome in outcomes if outcome.ask.is_streamed]
        while not all(stream.chunks or stream.ended for stream in streams):
            await asyncio.sleep(0.01)
        await disturb()
        await asyncio.gather(*tasks)
    return outcomes


def check_undisturbed(outcomes: list[Outcome], known: Known) -> None:
    """Check that each answer is complete and as it was undisturbed, and that no event came twice."""
    for outcome, (_, answer) in zip(outcomes, known, strict=True):
        assert (outcome.error, outcome.answer, outcome.num_repeated) == (None, answer, 0), outcome.ask.name


def undisturbed(url: str, asks: Sequence[Ask]) -> Known:
    """Return each request with its answer by an undisturbed cluster."""

    async def scenario() -> Known:
        async with client_of(url) as client:
            return await prepare(client, asks, at_once=4)

    return asyncio.run(scenario())
