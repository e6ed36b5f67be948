"""Hands over what is lost with a leaving replica: its streams, and the prefixes that only it holds.

    r0 leaves ──▶ its streams, and what does only r0 hold? ──▶ the most valuable per second of transfer first
                    stream   resumes elsewhere, with r0 as the source of its KV
                    prefix   a request for one token, placed as any other, with r0 as the source of its KV

A replica leaves when Serve stops it, or when its machine is about to end (`drain.notice`). In the second case, no
transfer begins that would not end in time: a stream then stays where it is. Only a few transfers are in progress
then, so that the first ones arrive early; otherwise as many as the replica sends, because it declines others. The
requests for prefixes serve only the cache: they run behind all others, and nothing waits for them. A replica that
does not receive the KV in time computes it, as for every fetch.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from deployments.client.attempt import Attempt, DispatchContext
from deployments.client.attempt_failure import AttemptFailure
from deployments.client.protocol import GenerateRequest
from deployments.client.stream import Stream
from deployments.wire.connection import WireConnection
from engine.values.sampling_params import SamplingParams
from router.addresses import KVAddress
from router.fetch.hot_prefixes import HotPrefix
from router.fetch.worth_moving import (
    NUM_AT_ONCE,
    chance_of_running,
    moving_seconds,
    worth_of_prefix,
    worth_of_stream,
)

logger = logging.getLogger("ray.serve")

T = TypeVar("T")

LAST = 2**31 - 1
"""The priority behind all clients' requests."""
LATE_S = 2.0
"""Seconds beyond its transfer for which a stream that has not resumed counts as a transfer."""
_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
_MAX_KNOWN = 4096


@dataclass(slots=True)
class _Leaving:
    """A replica that leaves, and what it has to hand over."""

    replica: str
    kv: KVAddress
    prefixes: list[HotPrefix] = field(default_factory=list)
    """Those whose transfer has not begun."""
    ends_at: float = math.inf
    """Clock at which its machine ends, if that was announced."""
    finish_rate: float = 0.0
    num_running: int = 0
    fetches: set[asyncio.Task[None]] = field(default_factory=set)
    """Prefixes that are fetched now."""
    streams: list[_Moving] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Moving:
    """A stream that has left."""

    stream: Stream
    num_tokens: int
    until: float
    """Clock from which it no longer counts as a transfer."""

    def is_moving(self, now: float) -> bool:
        """Whether its KV is probably on its way: the first token after it has not arrived."""
        has_resumed = self.stream.has_ended or self.stream.journal.num_tokens > self.num_tokens
        return not has_resumed and now < self.until


@dataclass(frozen=True, slots=True)
class _Item:
    """A stream or a prefix to hand over."""

    worth: float
    """Tokens saved per second of transfer."""
    seconds: float
    """The duration of the transfer."""
    begin: Callable[[], None]


class HandOvers:
    """Makes the remaining replicas take over what leaving ones have. Lives on one event loop."""

    def __init__(
        self, dispatch: DispatchContext, num_concurrent: int, on_kept: Callable[[int], None] = lambda _: None
    ) -> None:
        """`num_concurrent` transfers are in progress from one replica: as many as it sends concurrently. `on_kept`
        is called with the tokens that a replica has received of a prefix.
        """
        self._dispatch, self._num_concurrent, self._on_kept = dispatch, num_concurrent, on_kept
        self._known: dict[str, None] = {}  # replicas whose prefixes were looked up
        self._left: dict[str, KVAddress] = {}  # replicas whose connections ended before
        self._leaving: dict[str, _Leaving] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- replicas that leave -------------------------------------------------------------------------------

    def leave(self, connection: WireConnection) -> None:
        """Note that a connection ends. Its replica may have left the fleet a moment before `keep` is called."""
        replica, kv = connection.address.replica, connection.address.kv
        if kv is not None and connection.is_answering and replica not in self._known:
            _put(self._left, replica, kv)

    def keep(self, replica: str, prefixes: Sequence[HotPrefix]) -> None:
        """Have others fetch these prefixes from a replica that leaves, once for each replica.

        Does nothing for a replica that does not answer, because it has died, or that lends nothing.
        """
        if replica in self._known:
            return
        _put(self._known, replica, None)
        kv, connection = self._left.pop(replica, None), self._dispatch.connections.get(replica)
        if connection is not None and connection.is_answering:
            kv = connection.address.kv
        if kv is None or not prefixes or not self._dispatch.reachable() - {replica}:
            return
        self._leaving.setdefault(replica, _Leaving(replica, kv)).prefixes += prefixes

    def tick(self, now: float) -> None:
        """Begin the transfers for which there is room. `now` is the clock of the event loop."""
        for replica, connection in self._dispatch.connections.items():
            if connection.is_answering and connection.load.is_draining:
                self._follow(connection, now)
            elif replica in self._leaving and not self._is_gone(replica, connection):
                self._forget(self._leaving[replica])
        for replica, leaving in list(self._leaving.items()):
            open_one = self._dispatch.connections.get(replica)
            if open_one is not None and not open_one.is_answering:
                leaving.prefixes.clear()  # It has died, so others would compute them.
            self._move(leaving, now)
            if open_one is None and not leaving.prefixes and not leaving.fetches:
                del self._leaving[replica]

    async def aclose(self) -> None:
        """Cancel what is in progress. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _follow(self, connection: WireConnection, now: float) -> None:
        """Take in what a leaving replica reports."""
        replica, kv, load = connection.address.replica, connection.address.kv, connection.load
        if kv is None:
            return
        leaving = self._leaving.setdefault(replica, _Leaving(replica, kv))
        leaving.ends_at = math.inf if load.seconds_left is None else now + load.seconds_left
        leaving.finish_rate, leaving.num_running = load.finish_rate, load.num_running
        if replica not in self._known:
            _put(self._known, replica, None)
            self._start(self._look_up(leaving, is_noticed=load.seconds_left is not None))

    async def _look_up(self, leaving: _Leaving, is_noticed: bool) -> None:
        """Find the prefixes that only this replica holds. After a notice, the time limits what is moved, so all
        that are known come into question.
        """
        settings = self._dispatch.placer.settings
        max_tokens = settings.hot_tokens if is_noticed and settings.keep_tokens else settings.keep_tokens
        for prefix in self._dispatch.placer.only_held_by(leaving.replica, max_tokens):
            leaving.prefixes.append(prefix)
            await asyncio.sleep(0)  # Hashing the tokens of many takes long, and streams wait.

    def _is_gone(self, replica: str, connection: WireConnection) -> bool:
        """Whether a replica that does not say that it leaves has left: otherwise its notice was withdrawn."""
        return not connection.is_answering or replica not in self._dispatch.fleet.addresses()

    def _forget(self, leaving: _Leaving) -> None:
        """Begin no more transfers; if the replica leaves again, it is looked at again."""
        del self._leaving[leaving.replica]
        self._known.pop(leaving.replica, None)

    # --- transfers -----------------------------------------------------------------------------------------

    def _move(self, leaving: _Leaving, now: float) -> None:
        """Begin the most valuable transfers of a replica."""
        leaving.streams = [moving for moving in leaving.streams if moving.is_moving(now)]
        others = self._dispatch.reachable() - {leaving.replica}
        most = self._num_concurrent if math.isinf(leaving.ends_at) else min(NUM_AT_ONCE, self._num_concurrent)
        room = most - len(leaving.fetches) - len(leaving.streams)
        if room <= 0 or not others or self._dispatch.fleet.candidates(others).none_available:
            return
        in_time = (item for item in self._items(leaving, now) if now + item.seconds <= leaving.ends_at)
        for item in heapq.nlargest(room, in_time, key=lambda item: item.worth):
            item.begin()

    def _items(self, leaving: _Leaving, now: float) -> Iterator[_Item]:
        rate = self._dispatch.fleet.fetch_rate() or math.inf
        chance = chance_of_running(leaving.ends_at - now, leaving.finish_rate, leaving.num_running)
        for attempt in self._dispatch.sent_to(leaving.replica):
            if attempt.may_leave:
                num_tokens, seconds = attempt.num_tokens, moving_seconds(attempt.num_tokens, rate)
                begin = partial(self._move_stream, leaving, attempt, now + seconds + LATE_S)
                yield _Item(worth_of_stream(num_tokens, rate, chance), seconds, begin)
        for prefix in leaving.prefixes:
            seconds = moving_seconds(len(prefix.token_ids) - prefix.elsewhere, rate)
            yield _Item(worth_of_prefix(prefix, rate), seconds, partial(self._move_prefix, leaving, prefix))

    def _move_stream(self, leaving: _Leaving, attempt: Attempt, until: float) -> None:
        leaving.streams.append(_Moving(attempt.stream, attempt.stream.journal.num_tokens, until))
        attempt.leave(leaving.kv)

    def _move_prefix(self, leaving: _Leaving, prefix: HotPrefix) -> None:
        leaving.prefixes.remove(prefix)
        task = self._start(self._fetch(leaving, prefix))
        leaving.fetches.add(task)
        task.add_done_callback(leaving.fetches.discard)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _fetch(self, leaving: _Leaving, prefix: HotPrefix) -> None:
        """Have a replica fetch one prefix."""
        namespace, prompt_ids = prefix.namespace, list(prefix.token_ids)
        request = GenerateRequest(
            f"keep-{uuid.uuid4().hex}", namespace.model, prompt_ids, _SAMPLING, priority=LAST, salt=namespace.salt
        )
        source = AttemptFailure("lost", "it leaves", leaving.replica, loss="drained", kv=leaving.kv)
        attempt = Attempt(self._dispatch, Stream(request, _ignore), 0, (leaving.replica,), before=source)
        try:
            if await attempt.run() is None:
                self._on_kept(attempt.num_handed_over)
        except Exception:
            logger.exception("a prefix of %s could not be kept", leaving.replica)


def _put(known: dict[str, T], replica: str, value: T) -> None:
    """Add a replica to those known, and forget the one known longest when there are too many."""
    known[replica] = value
    if len(known) > _MAX_KNOWN:
        del known[next(iter(known))]


def _ignore(stream: Stream) -> None:
    """Ignore the stream, which has no reader."""
