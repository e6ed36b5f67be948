"""The record of one response, written when it begins, while it runs in the background, and when it has ended.

Where ingresses share a store, the record tells the others how a response is that runs here, and a mark that one of
them leaves ends it:

    here          "queued" ── beat ── beat ── beat ──▶ "completed"     a record without beats is a dead ingress's
    elsewhere                   └ reads        └ leaves a mark ──▶ "cancelled"
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from deployments.api.off_loop import near_or_far
from deployments.api.responses.background import ResponseJob
from deployments.api.responses.encoder import ResponsesEncoder
from deployments.api.responses.store import ResponseStore
from deployments.api.responses.stored import StoredResponse

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""Seconds between two times that a response in the background tells of itself, and looks for a mark."""
CANCEL, DELETE = b"cancel", b"delete"
INLINE_BYTES = 2**20
"""What is larger is packed, and read again, in a thread."""


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
        self._turn = asyncio.Lock()  # what is older must not be written last
        self._is_unwanted = False

    async def keep(self, events: bytes = b"") -> None:
        """Keep the response as it is now. Where that fails, the answer is given all the same."""
        async with self._turn:
            if self._is_unwanted:
                return
            beat_at = self._clock() if self._encoder.final is None and self._store.is_shared else None
            record = msgspec.structs.replace(self._stored, events=events, beat_at=beat_at)
            response = self._encoder.now()
            size = sum(map(len, response)) + len(record.items) + len(events)
            try:
                packed = await near_or_far(size, INLINE_BYTES, lambda: _packed(record, response))
                await self._store.put(self._tenant, self._encoder.context.id, packed)
            except Exception:
                logger.exception("response %s could not be stored", self._encoder.context.id)

    async def tell(self, job: ResponseJob) -> None:
        """Tell other ingresses of a response in the background, and do what their marks say, until cancelled."""
        mark = mark_of(self._encoder.context.id)
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                (asked,) = await self._store.get(self._tenant, [mark])
            except Exception:
                logger.exception("whether a response was cancelled elsewhere could not be read")
                continue
            if asked is not None:
                self._is_unwanted = asked == DELETE
                await self._store.delete(self._tenant, mark)
                await job.cancel()
                if self._is_unwanted:  # it may have been written again after it was deleted
                    await self._store.delete(self._tenant, self._encoder.context.id)
                return
            if self._encoder.final is None:
                await self.keep()


def _packed(record: StoredResponse, response: Sequence[bytes]) -> bytes:
    return msgspec.structs.replace(record, response=b"".join(response)).packed()
