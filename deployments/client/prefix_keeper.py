"""Keeps prefixes that only one replica holds when it is being stopped: other replicas fetch them from it.

    r0 is being stopped ──▶ what does only r0 hold? ──▶ a request for one token each, placed as any other, with
                                                         r0 as the source of its KV

These requests serve only the cache: they run behind all others, and nothing waits for them. A replica that does
not receive the KV in time computes it, as for every fetch.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import TypeVar

from deployments.client.attempt import Attempt, DispatchContext
from deployments.client.attempt_failure import AttemptFailure
from deployments.client.protocol import GenerateRequest
from deployments.client.stream import Stream
from deployments.wire.connection import WireConnection
from engine.values.sampling_params import SamplingParams
from router.addresses import KVAddress
from router.fetch.hot_prefixes import HotPrefix

logger = logging.getLogger("ray.serve")

T = TypeVar("T")

LAST = 2**31 - 1
"""The priority behind all clients' requests."""
_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
_MAX_KNOWN = 4096


class PrefixKeeper:
    """Makes the remaining replicas fetch what a leaving one holds. Lives on one event loop."""

    def __init__(self, dispatch: DispatchContext, num_concurrent: int) -> None:
        """`num_concurrent` prefixes are in progress from one replica: as many as it sends concurrently."""
        self._dispatch, self._num_concurrent = dispatch, num_concurrent
        self._known: dict[str, None] = {}  # replicas already processed, whose names are never used again
        self._left: dict[str, KVAddress] = {}  # replicas whose connections ended before
        self._tasks: set[asyncio.Task[None]] = set()

    def is_new(self, replica: str) -> bool:
        """Whether `keep` was not called for a replica yet."""
        return replica not in self._known

    def leave(self, connection: WireConnection) -> None:
        """Note that a connection ends. Its replica may have left the fleet a moment before `keep` is called."""
        replica, kv = connection.address.replica, connection.address.kv
        if kv is not None and connection.is_answering and self.is_new(replica):
            _put(self._left, replica, kv)

    def keep(self, replica: str, prefixes: Sequence[HotPrefix]) -> None:
        """Have others fetch these prefixes from a replica that is being stopped, once for each replica.

        Does nothing for a replica that does not answer, because it has died, or that lends nothing.
        """
        if not self.is_new(replica):
            return
        _put(self._known, replica, None)
        kv, connection = self._left.pop(replica, None), self._dispatch.connections.get(replica)
        if connection is not None and connection.is_answering:
            kv = connection.address.kv
        if kv is None or not prefixes or not self._dispatch.reachable() - {replica}:
            return
        task = asyncio.create_task(self._keep_all(replica, kv, prefixes))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Cancel what is in progress. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_all(self, replica: str, kv: KVAddress, prefixes: Sequence[HotPrefix]) -> None:
        room = asyncio.Semaphore(self._num_concurrent)

        async def keep(prefix: HotPrefix) -> bool:
            async with room:
                return await self._fetch(replica, kv, prefix)

        are_kept = await asyncio.gather(*map(keep, prefixes), return_exceptions=True)
        for error in are_kept:
            if isinstance(error, Exception):
                logger.error("a prefix of %s could not be kept", replica, exc_info=error)
        num_kept = sum(kept is True for kept in are_kept)
        logger.info("%d of %d prefixes that only %s held are kept elsewhere", num_kept, len(prefixes), replica)

    async def _fetch(self, replica: str, kv: KVAddress, prefix: HotPrefix) -> bool:
        """Have one prefix fetched. Return whether a replica has it now."""
        namespace, prompt_ids = prefix.namespace, list(prefix.token_ids)
        request = GenerateRequest(
            f"keep-{uuid.uuid4().hex}", namespace.model, prompt_ids, _SAMPLING, priority=LAST, salt=namespace.salt
        )
        leaving = AttemptFailure("lost", "it is being stopped", replica, loss="drained", kv=kv)
        attempt = Attempt(self._dispatch, Stream(request, _ignore), 0, (replica,), before=leaving)
        return await attempt.run() is None


def _put(known: dict[str, T], replica: str, value: T) -> None:
    """Add a replica to those known, and forget the one known longest when there are too many."""
    known[replica] = value
    if len(known) > _MAX_KNOWN:
        del known[next(iter(known))]


def _ignore(stream: Stream) -> None:
    """Ignore the stream, which has no reader."""
