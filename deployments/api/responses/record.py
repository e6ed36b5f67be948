"""The record of one response, written when it begins, while it runs in the background, and when it has ended.

If ingresses share a store, the record shows the others the state of a response that runs here, and each of them
can end it with a mark:

    here          "queued" ── beat ── beat ── beat ──▶ "completed"     a record without beats is a dead ingress's
    elsewhere                   └ reads        └ leaves a mark ──▶ "cancelled"
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec

from deployments.api.base.errors import ApiError, log_failure
from deployments.api.base.off_loop import near_or_far
from deployments.api.responses.background import ResponseJob
from deployments.api.responses.encoder import ResponsesEncoder
from deployments.api.responses.store import ResponseStore
from deployments.api.responses.stored import StoredResponse

BEAT_S = 1.0
"""Seconds between two beats of a response in the background, each with a look for a mark."""
CANCEL, DELETE = b"cancel", b"delete"
INLINE_BYTES = 2**20
"""Larger records are packed and unpacked in a thread."""


def mark_of(name: str) -> str:
    """Return the name under which a mark for a response is kept."""
    return name.replace("resp_", "mark_")


class ResponseKeeper:
    """Keeps the record of one response."""

    def __init__(
        self,
        store: ResponseStore,
        tenant: str,
        encoder: ResponsesEncoder,
        stored: StoredResponse,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._tenant, self._encoder, self._stored = store, tenant, encoder, stored
        self._clock = clock
        self._turn = asyncio.Lock()  # An older state must not overwrite a newer one.
        self._is_unwanted = False
        self.is_kept = False
        """Whether it is stored as it was when that was last tried."""

    async def try_keep(self, events: bytes = b"") -> bool:
        """Store the response in its present state. Return whether that succeeded; the log has the failure."""
        try:
            await self.keep(events)
        except Exception as error:
            log_failure(error, f"storing the response {self._encoder.context.id}")
        return self.is_kept

    async def keep_end(self, events: bytes) -> None:
        """Store the response in its final state; if that fails, try to store at least its failure."""
        if not await self.try_keep(events):
            reason = "The response could not be stored (responses.store, responses.max_bytes)."
            self._encoder.failed(ApiError(507, reason), has_output=False)
            if not await self.try_keep():
                with contextlib.suppress(OSError, ApiError):  # Otherwise it would appear queued for ever.
                    await self._store.delete(self._tenant, self._encoder.context.id)

    async def leave(self) -> None:
        """Store the response no more, because another ingress continues it. A record that only this ingress can
        read is deleted.
        """
        async with self._turn:
            self._is_unwanted = True
            if not self._store.is_shared:
                await self._store.delete(self._tenant, self._encoder.context.id)

    async def keep(self, events: bytes = b"") -> None:
        """Store the response in its present state. Raises the store's exceptions."""
        async with self._turn:
            self.is_kept = False
            if self._is_unwanted:
                self.is_kept = True
                return
            beat_at = self._clock() if self._encoder.final is None and self._store.is_shared else None
            record = msgspec.structs.replace(self._stored, events=events, beat_at=beat_at)
            response = self._encoder.now()
            size = sum(map(len, response)) + len(record.items) + len(events)
            packed = await near_or_far(size, INLINE_BYTES, lambda: _packed(record, response))
            await self._store.put(self._tenant, self._encoder.context.id, packed)
            self.is_kept = True

    async def tell(self, job: ResponseJob) -> None:
        """Report a response in the background to other ingresses, and obey their marks, until cancelled."""
        mark = mark_of(self._encoder.context.id)
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                (asked,) = await self._store.get(self._tenant, [mark])
                if asked == DELETE:
                    await self._forget()
                if asked is not None:
                    await self._store.delete(self._tenant, mark)
            except Exception as error:
                log_failure(error, "obeying another ingress's mark on a response")
                continue
            if asked is not None:
                await job.cancel()  # The job's end also cancels this task, so nothing is left to do.
                return
            if self._encoder.final is None:
                await self.try_keep()

    async def _forget(self) -> None:
        """Delete it, as it may have been written again after it was deleted, and never write it again."""
        async with self._turn:
            self._is_unwanted = True
            await self._store.delete(self._tenant, self._encoder.context.id)


def _packed(record: StoredResponse, response: Sequence[bytes]) -> bytes:
    return msgspec.structs.replace(record, response=b"".join(response)).packed()
