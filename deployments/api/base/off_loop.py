"""Runs the work of large requests in threads that tenants share fairly, so that the event loop is not blocked.

The share of a request's tenant goes with its task, as the request's id does for the log. A thread gives way to the
loop every 5 ms (`sys.getswitchinterval`), but only between steps of the interpreter: no single call into C may be
long. The limits that are checked first bound those calls (`limits.max_json_values`, the context).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from deployments.admission.fair_threads import FairThreads
from deployments.config.tenants import ANONYMOUS

T = TypeVar("T")
_share: ContextVar[tuple[FairThreads, str] | None] = ContextVar("share_of_threads", default=None)
MOST_THREADS = 5
"""Most threads with `limits.prepare_threads: auto`. Each that has work may delay the event loop by 5 ms."""


def take_share(threads: FairThreads, tenant: str) -> None:
    """Have the current task's work done by `threads`, on `tenant`'s account."""
    _share.set((threads, tenant))


def working_for() -> str:
    """Return the tenant whose request the current task answers."""
    share = _share.get()
    return ANONYMOUS.name if share is None else share[1]


async def off_loop(work: Callable[[], T]) -> T:
    """Do work in a thread when it is the tenant's turn, and return its result or raise its exception."""
    share = _share.get()
    if share is None:  # called by a program, outside a service
        return await asyncio.to_thread(work)
    threads, tenant = share
    return await threads.run(tenant, work)


async def near_or_far(size: int, inline: int, work: Callable[[], T]) -> T:
    """Do work immediately if its size is at most `inline`, else in a thread."""
    return work() if size <= inline else await off_loop(work)


def num_threads(setting: int | str, cores: int) -> int:
    """Return the number of threads that the setting `prepare_threads` means on a machine with `cores` cores."""
    return setting if isinstance(setting, int) else min(cores + 1, MOST_THREADS)
