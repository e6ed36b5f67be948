"""One request's stream in the ingress: filled from the wire, read by the API at its own pace.

    attempt ──feed──▶ journal, [ tokens not read yet, merged ] ──__anext__──▶ API

There is no queue of deltas to bound: tokens that a slow reader has not read are merged into one delta, at most as
long as the request's output. A migration from one replica to another is invisible to the reader.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from deployments.client.futures import retrieve
from deployments.client.journal import Journal
from deployments.client.protocol import GenerateRequest, TakenOver, Turn
from deployments.client.timeline import ReplicaSpan, Timeline
from engine.values.stream_delta import StreamDelta

Farewell = Literal["abort", "detach", "nothing"]
"""Whether the replica aborts the request, generates it further for a while, or has another reader already."""


class Stream:
    """A `Generation`. Lives on the ingress's event loop; calls `on_close` once, when the reader leaves early."""

    def __init__(
        self, request: GenerateRequest, on_close: Callable[[Stream], None], turn: Turn | None = None
    ) -> None:
        """`turn` is the request's admission, if it waited for one."""
        self.request = request
        self.journal = Journal(request)
        self.replica: str | None = None
        """Id of the replica that generates the stream; None until one has accepted."""
        self.opened_at = now = time.monotonic()
        """Clock (`time.monotonic`) at its start."""
        self.timeline = Timeline(now, now) if turn is None else Timeline(turn.asked_at, turn.sent_at)
        self._turn = turn
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when an engine has accepted; fails with the error that `EngineClient.generate` raises."""
        self.accepted.add_done_callback(retrieve)
        self.has_ended = False
        """Whether the stream has finished, failed or been closed."""
        self.farewell: Farewell = "abort"
        """The order to the replica of a request that has not finished when the stream ends here."""
        self._explain: Callable[[], dict[str, Any] | None] = lambda: None
        self._unread: StreamDelta | None = None
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._is_exhausted = False
        self._on_close = on_close

    # --- the engines' side ---------------------------------------------------------------------------------

    def placed(self) -> None:
        """Record that the request counts at a replica, which it is sent to."""
        if self._turn is not None:
            self._turn.sent()

    def accept(self, replica: str, explain: Callable[[], dict[str, Any] | None]) -> None:
        """Record that a replica accepted or resumed the request; `explain` returns why that one was chosen."""
        self.replica, self._explain = replica, explain
        if not self.accepted.done():
            self.accepted.set_result(None)

    def begin(self, span: ReplicaSpan, explain: Callable[[], dict[str, Any] | None]) -> None:
        """Record that a replica sent its first token; if several accepted, this one generates the stream."""
        self.replica, self._explain = span.replica, explain
        self.timeline.spans.append(span)

    def feed(self, delta: StreamDelta, now: float) -> bool:
        """Add a delta, which states the token of the stream at which it starts; skip tokens received before.

        Return False when tokens before it are missing and must be requested again.
        """
        if self.has_ended:
            return True
        journal = self.journal
        if not journal.is_next(delta):
            return False
        num_tokens = len(journal.token_ids)
        if not num_tokens:
            journal.num_cached = delta.num_cached  # Later hits are pages that this stream computed.
        if self._turn is not None and (delta.token_ids or delta.finish_reason is not None):
            turn, self._turn = self._turn, None
            turn.began(delta)
        is_new = delta.start == num_tokens and delta.prompt_logprobs is None
        fresh = delta if is_new else delta.since(num_tokens, journal.num_prompt_reported)
        fresh.num_cached = journal.num_cached
        journal.record(fresh, now)
        if self._unread is not None:
            self._unread.add(fresh)
        elif not fresh.is_empty:
            self._unread = fresh
        if fresh.finish_reason is not None:
            self.has_ended = True
        self._wake()
        return True

    def fail(self, error: Exception) -> None:
        """End the stream with an error: the reader receives the unread tokens, then `error`."""
        if self.has_ended:
            return
        self._error = error
        self.has_ended = True
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self._wake()

    def give_up(self) -> None:
        """End the stream because another reader continues it."""
        self.farewell = "nothing"
        self.fail(TakenOver(f"another reader continues {self.request.request_id}"))

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # --- the reader's side ---------------------------------------------------------------------------------

    def explain(self) -> dict[str, Any] | None:
        """Return the router's record of the last placement, if it is still kept."""
        return self._explain()

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        """Return the deltas since the last call as one delta; wait if there are none."""
        while self._unread is None:
            if self._is_exhausted:
                raise StopAsyncIteration
            if self._error is not None:
                self._is_exhausted = True
                raise self._error
            if self.has_ended:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        unread, self._unread = self._unread, None
        self._is_exhausted = unread.finish_reason is not None
        return unread

    async def aclose(self) -> None:
        """Abort the request in the engine unless the stream has ended. Idempotent."""
        if not self.has_ended:
            self.has_ended = True
            self._wake()
            self._on_close(self)

    async def detach(self) -> None:
        """Stop reading; the engine generates a resumable request further for a while. Idempotent."""
        self.leave_running()
        await self.aclose()

    def leave_running(self) -> None:
        """Have the engine generate a resumable request further after this stream has ended here."""
        if self.request.stream is not None and self.farewell == "abort":
            self.farewell = "detach"
