"""The requests that wait for admission, in order, in one queue or in one for each tenant."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, KeysView
from itertools import chain
from operator import attrgetter

from engine.base.errors import QueueFull
from engine.values.request import Request

precedence = attrgetter("queue_position")
"""Sort key: requests are admitted in this order and preempted in the reverse one."""


class WaitingQueue:
    """Bounded in requests and tokens; but the only request may have any size, and preempted ones always return."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._queues: dict[str, list[Request]] = {}  # none of them empty
        self._num_requests = 0
        self.num_deferrable = 0
        """Waiting requests that are deferrable."""
        self.num_tokens = 0
        """Prompt and output tokens of all waiting requests."""
        self.num_uncached = 0
        """Prompt tokens that were neither cached nor being loaded when their requests were added."""

    def check_room(self, request: Request, num_coming: int = 0, tokens_coming: int = 0) -> None:
        """Raise QueueFull if there is no room after the requests about to be added. Has no side effects."""
        waiting, tokens = self._num_requests + num_coming, self.num_tokens + tokens_coming
        if waiting >= self._max_requests:
            raise QueueFull(f"{waiting} requests are waiting, the limit (engine.max_waiting)")
        if waiting and tokens + request.num_tokens > self._max_tokens:
            limit = f"{self._max_tokens} (engine.max_waiting_tokens)"
            raise QueueFull(f"{tokens} prompt tokens are waiting, the limit is {limit}")

    def add(self, request: Request) -> None:
        """Put a request at its position."""
        bisect.insort(self._queues.setdefault(request.queue_position.queue, []), request, key=precedence)
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        """Remove a request that was admitted or has ended."""
        queue = self._queues[request.queue_position.queue]
        queue.remove(request)
        if not queue:
            del self._queues[request.queue_position.queue]
        self._count(request, -1)

    @property
    def queues(self) -> KeysView[str]:
        """The queues in which requests wait."""
        return self._queues.keys()

    def first(self, queue: str, count: int) -> list[Request]:
        """Return the next `count` requests of a queue in order, and the first of each tenant without one."""
        requests = self._queues.get(queue, [])
        if len(requests) <= count:
            return requests[:]
        firsts = {request.tenant: request for request in reversed(requests[count:])}
        known = {request.tenant for request in requests[:count]}
        return requests[:count] + [request for tenant, request in firsts.items() if tenant not in known]

    def first_urgent(self) -> Request | None:
        """Return the first in order of the requests that are not deferrable. O(queues)."""
        if self.num_deferrable == self._num_requests:
            return None
        return min((queue[0] for queue in self._queues.values()), key=precedence)

    def _count(self, request: Request, sign: int) -> None:
        num_tokens = sign * len(request.tokens)
        self._num_requests += sign
        self.num_deferrable += sign * request.is_deferrable
        self.num_tokens += num_tokens
        self.num_uncached += num_tokens - sign * request.num_expected_cached

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._queues.values())

    def __len__(self) -> int:
        return self._num_requests
