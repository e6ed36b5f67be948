"""Sends many requests, retries those that another attempt can help, and yields the answers as they come.

The runner itself waits and retries where the API would ask a user to try later. It reads the next request only
when there is room for it, and there is none while its reader takes no answers, so neither requests nor answers
accumulate in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from deployments.batch.errors import BatchStopped
from deployments.batch.in_thread import in_thread
from deployments.batch.throttle import LONGEST_PAUSE_S, Throttle
from deployments.config.settings import BatchSettings

K = TypeVar("K")
IGNORED_FIELDS = "x-raydix-ignored-fields"


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of an API to one request."""

    status: int
    """The HTTP status."""
    body: bytes
    """A JSON object without line breaks; from 400 on, an error in OpenAI's form."""
    request_id: str = ""
    retry_after_s: float | None = None
    """Seconds after which the API asked for a retry."""
    is_final: bool = False
    """Whether the API said that another attempt is useless (`x-should-retry: false`)."""
    ignored_fields: str = ""
    """The fields of the request that the API ignored, as in its header `IGNORED_FIELDS`."""


class NoReply(Exception):
    """The API could not be reached, or the connection broke before it answered."""

    def __init__(self, reason: str, *, was_sent: bool) -> None:
        """With `was_sent`, the API may have worked on the request, which may even have broken the connection."""
        super().__init__(reason)
        self.was_sent = was_sent


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


_error_decoder = msgspec.json.Decoder(_ErrorBody)
_BEGUN_CODES = ("engine_lost", "aborted")
"""Codes of a 503 which mean that an engine had begun the request."""

Post = Callable[[str, bytes], Awaitable[Reply]]
"""Sends a body to an endpoint. Raises NoReply."""


@dataclass(frozen=True, slots=True)
class BatchCall(Generic[K]):
    """A request to send; the key is the caller's own."""

    key: K
    url: str
    body: bytes


class _Source(Generic[K]):
    """Distributes requests to several workers."""

    def __init__(self, calls: Iterable[BatchCall[K]], *, in_thread: bool) -> None:
        self._calls, self._in_thread = iter(calls), in_thread
        self._turn = asyncio.Lock()

    async def next(self) -> BatchCall[K] | None:
        """Return the next request; None if there is none left."""
        if not self._in_thread:
            return next(self._calls, None)
        async with self._turn:
            return await in_thread(next, self._calls, None)


class BatchRunner:
    """Sends requests through `post`. Lives on one event loop."""

    def __init__(self, post: Post, settings: BatchSettings) -> None:
        self._post, self._settings = post, settings
        self._throttle = Throttle(settings.max_in_flight)
        self._is_leaving = False

    def leave(self) -> None:
        """Send nothing more: requests in flight are answered, and nothing is yielded for all others."""
        self._is_leaving = True
        self._throttle.open()

    async def run(
        self, calls: Iterable[BatchCall[K]], *, reads_in_thread: bool = False
    ) -> AsyncGenerator[list[tuple[BatchCall[K], Reply | NoReply]]]:
        """Yield the last reply to each request, in lists of all that are there when the caller asks.

        With `reads_in_thread`, the calls are read from their source in a thread, one at a time.

        Raises BatchStopped when continuing is useless. Close it to abort the requests in flight.
        """
        source = _Source(calls, in_thread=reads_in_thread)
        most = self._settings.max_in_flight
        results: asyncio.Queue[tuple[BatchCall[K], Reply | NoReply] | Exception | None] = asyncio.Queue(most)

        async def work() -> None:
            try:
                while not self._is_leaving and (call := await source.next()) is not None:
                    reply = await self._last_reply(call)
                    if reply is not None:
                        await results.put((call, reply))
                await results.put(None)
            except Exception as error:
                await results.put(error)

        workers = [asyncio.create_task(work()) for _ in range(most)]
        num_working = most
        try:
            while num_working:
                ready = [await results.get()]
                while not results.empty():
                    ready.append(results.get_nowait())
                num_working -= ready.count(None)
                if replies := [result for result in ready if isinstance(result, tuple)]:
                    yield replies
                for result in ready:
                    if isinstance(result, Exception):
                        raise result
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _last_reply(self, call: BatchCall[K]) -> Reply | NoReply | None:
        """Send a request until its reply is final or it was sent often enough; None if it is left to a later
        run. Raises BatchStopped.
        """
        num_failures = 0
        while True:
            reply = await self._attempt(call)
            if reply is None:
                return None
            if isinstance(reply, Reply) and not _can_change(reply):
                self._check_key(reply)
                return reply
            if _was_begun(reply):
                num_failures += 1
                if num_failures >= self._settings.max_attempts:
                    return reply
                await asyncio.sleep(min(2.0**num_failures, LONGEST_PAUSE_S))
            elif self._throttle.stuck_s >= self._settings.patience_s:
                seconds = f"{self._settings.patience_s:g} seconds"
                raise BatchStopped(
                    f"the API has accepted no request for {seconds}; the last attempt: {_said(reply)}"
                )

    async def _attempt(self, call: BatchCall[K]) -> Reply | NoReply | None:
        await self._throttle.enter()
        if self._is_leaving:
            self._throttle.left()
            return None
        try:
            reply: Reply | NoReply = await self._post(call.url, call.body)
        except NoReply as error:
            reply = error
        except BaseException:
            self._throttle.left()
            raise
        if _was_begun(reply):
            self._throttle.left()
        elif isinstance(reply, NoReply):
            self._throttle.refused(None)
        elif _can_change(reply):
            self._throttle.refused(reply.retry_after_s)
        else:
            self._throttle.answered()
        return reply

    def _check_key(self, reply: Reply) -> None:
        if reply.status == 401:
            raise BatchStopped(f"the API refuses the key: {_said(reply)}")


def _can_change(reply: Reply) -> bool:
    """Return whether another attempt may have another outcome."""
    return not reply.is_final and (reply.status in (408, 429) or reply.status >= 500)


def _was_begun(reply: Reply | NoReply) -> bool:
    """Return whether the API worked on the request and failed, so that each attempt costs as much as an answer."""
    if isinstance(reply, NoReply):
        return reply.was_sent
    if not _can_change(reply) or reply.status == 429:
        return False
    return reply.status != 503 or _error_code(reply.body) in _BEGUN_CODES


def _error_code(body: bytes) -> str | None:
    """Return the code in an error object; None when there is none."""
    try:
        return _error_decoder.decode(body).error.code
    except msgspec.DecodeError:
        return None


def _said(reply: Reply | NoReply) -> str:
    if isinstance(reply, NoReply):
        return str(reply)
    return f"HTTP {reply.status}, {reply.body[:500].decode(errors='replace')}"
