"""Threads that tenants share fairly, for work that would block the event loop.

    tenant a  [ 900 ms ] [ 900 ms ] ...   two threads of three at most: the last idle one is for tenants with none
    tenant b  [ 3 ms ]                    begins immediately

Turns are given by deficit round robin (`engine/tenants/round_robin.py`) over the processor time of finished
work, which is known only afterwards. Work is not interrupted, so it should come in pieces of a second at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.tenants.round_robin import DeficitRoundRobin

T = TypeVar("T")
QUANTUM_US = 20_000
"""Microseconds of processor time that a tenant of weight 1 may take on each of its turns."""


@dataclass(eq=False, slots=True)
class _Job:
    """Work that waits or runs, and the receiver of its result."""

    tenant: str
    work: Callable[[], Any]
    context: contextvars.Context
    loop: asyncio.AbstractEventLoop | None = None
    future: asyncio.Future[Any] | None = None
    """None: the result has no receiver."""

    def tell(self, result: Any, error: BaseException | None) -> None:
        """Deliver the result, from any thread."""
        if self.loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            self.loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        assert self.future is not None
        if self.future.done():  # the waiting task was cancelled
            return
        if error is None:
            self.future.set_result(result)
        elif isinstance(error, asyncio.CancelledError):
            self.future.cancel()
        else:
            self.future.set_exception(error)


class FairThreads:
    """A pool of threads. `run` may be called from any event loop; threads start when they are first needed."""

    def __init__(
        self,
        num_threads: int,
        name: str,
        weights: Mapping[str, float] | None = None,
        *,
        reserves_one: bool = True,
        most_each: int | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`name` begins the threads' names. `weights` are tenants' shares; others weigh 1.

        With `reserves_one`, the last idle thread is reserved for tenants that have none; `most_each` bounds how
        many a tenant has at a time. Work is charged with the difference of two times of `clock`, in seconds: by
        default the processor time of its thread.
        """
        self._executor = ThreadPoolExecutor(num_threads, name)
        self._num_threads, self._clock = num_threads, clock
        self._num_reserved = 1 if reserves_one else 0
        self._most_each = num_threads if most_each is None else most_each
        self._lock = threading.Lock()  # guards all fields below
        self._turns = DeficitRoundRobin(QUANTUM_US, weights)
        self._waiting: dict[str, deque[_Job]] = {}  # tenant -> its waiting work
        self._running: dict[str, int] = {}  # tenant -> its threads, if it has any

    def weigh(self, weights: Mapping[str, float] | None, *, reserves_one: bool = True) -> None:
        """Share by other weights from now on."""
        with self._lock:
            self._turns.weigh(QUANTUM_US, weights)
            self._num_reserved = 1 if reserves_one else 0

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Run `work` in a thread when it is the tenant's turn, and return its result or raise its exception.

        If this is cancelled, waiting work is not run, and the result of running work is dropped.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        job = _Job(tenant, work, contextvars.copy_context(), loop, future)
        self._add(job)
        try:
            return await future
        finally:
            if future.cancelled():
                self._withdraw(job)

    def submit(self, tenant: str, work: Callable[[], None]) -> None:
        """Run `work` in a thread when it is the tenant's turn. It must not raise: no caller would notice."""
        self._add(_Job(tenant, work, contextvars.copy_context()))

    def num_waiting(self, tenant: str) -> int:
        """Return how many pieces of a tenant's work wait for a thread."""
        with self._lock:
            return len(self._waiting.get(tenant, ()))

    def close(self) -> None:
        """Cancel waiting work; threads end with their current work. Idempotent."""
        with self._lock:
            jobs = [job for queue in self._waiting.values() for job in queue]
            for tenant in list(self._waiting):
                self._leave(tenant)
        for job in jobs:
            job.tell(None, asyncio.CancelledError())
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _add(self, job: _Job) -> None:
        with self._lock:
            if job.tenant not in self._waiting:
                self._waiting[job.tenant] = deque()
                self._turns.join(job.tenant)
            self._waiting[job.tenant].append(job)
        self._executor.submit(self._serve)

    def _serve(self) -> None:
        """Do work until there is none that this thread may take."""
        while (job := self._take()) is not None:
            began = self._clock()
            result, error = None, None
            try:
                result = job.context.run(job.work)
            except BaseException as raised:
                error = raised
            self._end(job.tenant, self._clock() - began)
            job.tell(result, error)
            del job, result, error  # a thread that waits for work holds no request

    def _take(self) -> _Job | None:
        with self._lock:
            num_idle = self._num_threads - sum(self._running.values())
            # A tenant that is left out has a thread, which looks for more work when it is done.
            allowed = [
                name
                for name in self._waiting
                if (num_idle > self._num_reserved or name not in self._running)
                and self._running.get(name, 0) < self._most_each
            ]
            tenant = self._turns.turn(allowed)
            if tenant is None:
                return None
            job = self._waiting[tenant].popleft()
            self._running[tenant] = self._running.get(tenant, 0) + 1
            if not self._waiting[tenant]:
                self._leave(tenant)
            return job

    def _end(self, tenant: str, seconds: float) -> None:
        with self._lock:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            self._turns.charge(tenant, seconds * 1e6)

    def _withdraw(self, job: _Job) -> None:
        with self._lock:
            queue = self._waiting.get(job.tenant)
            if queue is not None and job in queue:
                queue.remove(job)
                if not queue:
                    self._leave(job.tenant)

    def _leave(self, tenant: str) -> None:
        del self._waiting[tenant]
        self._turns.leave(tenant)
