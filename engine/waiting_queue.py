"""The requests that wait for admission, in order of precedence, within bounds."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from engine.errors import QueueFull
from engine.request import Request


def precedence(request: Request) -> tuple[int, float]:
    """Order of admission, and against the order of preemption: high priority first, then by arrival."""
    return (-request.priority, request.arrival)


class WaitingQueue:
    """Bounded in requests and tokens, but for one request of any size, and for preempted ones, which come back."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._requests: list[Request] = []
        self.num_tokens = 0
        """Prompt and output tokens of all that wait."""
        self.num_uncached = 0
        """Those of them that were not cached when they came."""

    def check_room(self, request: Request, num_coming: int = 0, tokens_coming: int = 0) -> None:
        """Raise QueueFull when there is no room beside what else is coming. Has no side effects."""
        waiting, tokens = len(self._requests) + num_coming, self.num_tokens + tokens_coming
        if waiting >= self._max_requests:
            raise QueueFull(f"{waiting} requests are waiting, the limit")
        if waiting and tokens + request.num_tokens > self._max_tokens:
            raise QueueFull(f"{tokens} prompt tokens are waiting, the limit is {self._max_tokens}")

    def add(self, request: Request) -> None:
        """Put a request at its place."""
        bisect.insort(self._requests, request, key=precedence)
        self.num_tokens += request.num_tokens
        self.num_uncached += request.num_tokens - request.num_expected

    def remove(self, request: Request) -> None:
        """Take a request out: it was admitted, or has ended."""
        self._requests.remove(request)
        self.num_tokens -= request.num_tokens
        self.num_uncached -= request.num_tokens - request.num_expected

    def first(self, count: int) -> list[Request]:
        """The next `count` requests in order."""
        return self._requests[:count]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
