"""One request's stream in the ingress: filled from the wire, read by the API at its own pace.

    attempt ──feed──▶ journal, [ tokens not read yet, merged ] ──__anext__──▶ API

There is no queue of deltas to bound: what a slow reader has not taken is one delta that grows, at most to the
request's own length. Which replica the tokens come from, and whether it changed, does not show here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from deployments.client.futures import retrieve
from deployments.client.journal import Journal
from deployments.client.protocol import GenerateRequest, Turn
from deployments.client.timeline import ReplicaSpan, Timeline
from engine.stream_delta import StreamDelta


class Stream:
    """A `Generation`. Lives on the ingress's event loop; `on_close` is called once, when a reader leaves early."""

    def __init__(
        self, request: GenerateRequest, on_close: Callable[[Stream], None], turn: Turn | None = None
    ) -> None:
        """`turn` is the request's admission, if it had to wait for one."""
        self.request = request
        self.journal = Journal(request)
        self.replica: str | None = None
        """Id of the replica that generates it; None until one accepted."""
        now = time.monotonic()
        self.timeline = Timeline(now, now) if turn is None else Timeline(turn.asked_at, turn.sent_at)
        self._turn = turn
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when an engine accepted; fails with what `EngineClient.generate` raises."""
        self.accepted.add_done_callback(retrieve)
        self.ended = asyncio.Event()
        """No more will come: finished, failed or closed."""
        self._explain: Callable[[], dict[str, Any] | None] = lambda: None
        self._num_cached = 0
        self._unread = StreamDelta(request.request_id)
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._is_exhausted = False
        self._on_close = on_close

    # --- the engines' side ---------------------------------------------------------------------------------

    def accept(self, replica: str, explain: Callable[[], dict[str, Any] | None]) -> None:
        """A replica took the request (or took it over); `explain` says why that one."""
        self.replica, self._explain = replica, explain
        if not self.accepted.done():
            self.accepted.set_result(None)

    def begin(self, span: ReplicaSpan, explain: Callable[[], dict[str, Any] | None]) -> None:
        """A replica has brought its first token: of several that accepted, this is the one that counts."""
        self.replica, self._explain = span.replica, explain
        self.timeline.spans.append(span)

    def feed(self, delta: StreamDelta, now: float) -> bool:
        """Take in a delta, which says at which token of the stream it starts; what was received before is skipped.

        False when something before it is missing: it has to be asked for again.
        """
        if self.ended.is_set():
            return True
        if not self.journal.is_next(delta):
            return False
        if not len(self.journal):
            self._num_cached = delta.num_cached  # Later ones are hits of what this very stream computed.
        if self._turn is not None and (delta.token_ids or delta.finish_reason is not None):
            turn, self._turn = self._turn, None
            turn.began(delta)
        fresh = delta.since(len(self.journal), self.journal.num_prompt_reported)
        fresh.num_cached = self._num_cached
        self.journal.record(fresh, now)
        self._unread.add(fresh)
        if fresh.finish_reason is not None:
            self.ended.set()
        self._wake()
        return True

    def fail(self, error: Exception) -> None:
        """Nothing more will come: the reader gets what there is, then `error`."""
        if self.ended.is_set():
            return
        self._error = error
        self.ended.set()
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # --- the reader's side ---------------------------------------------------------------------------------

    def explain(self) -> dict[str, Any] | None:
        """Why it runs where it runs, if that is still known."""
        return self._explain()

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        """What came since the last call, as one delta; waits when nothing did."""
        while self._unread.is_empty:
            if self._is_exhausted:
                raise StopAsyncIteration
            if self._error is not None:
                self._is_exhausted = True
                raise self._error
            if self.ended.is_set():
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        unread, self._unread = self._unread, StreamDelta(self.request.request_id)
        self._is_exhausted = unread.finish_reason is not None
        return unread

    async def aclose(self) -> None:
        """Abort in the engine when not finished. Idempotent."""
        if not self.ended.is_set():
            self.ended.set()
            self._wake()
            self._on_close(self)
