"""Blocks that replicas will hold because this process sent prompts there, until the replicas confirm them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from types import MappingProxyType

_NONE: Mapping[int, float] = MappingProxyType({})


class ExpectedBlocks:
    """Unconfirmed blocks by replica, each with its time of expiry."""

    def __init__(self, expect_s: float, limit: int) -> None:
        """A dispatch counts for `expect_s` seconds; `limit` is the most blocks of unexpired dispatches."""
        self._expect_s = expect_s
        self._limit = limit
        self._due: dict[str, dict[int, float]] = {}  # replica -> block -> when it expires, seconds
        self._queue: deque[tuple[float, str, list[int]]] = deque()  # dispatches, the first to expire first
        self._num_queued = 0

    def of(self, replica: str) -> Mapping[int, float]:
        """Return the replica's unconfirmed blocks with their times of expiry, in seconds."""
        return self._due.get(replica, _NONE)

    def add(self, replica: str, blocks: list[int], now: float) -> None:
        """Expect `blocks`; those that were expected before expire later now. O(len(blocks))."""
        if blocks:
            until = now + self._expect_s
            self._due.setdefault(replica, {}).update(zip(blocks, repeat(until)))
            self._queue.append((until, replica, blocks))
            self._num_queued += len(blocks)

    def settle(self, replica: str, blocks: Iterable[int]) -> None:
        """Stop expecting `blocks`: the replica itself has reported them."""
        due = self._due.get(replica)
        if due:
            for block in blocks:
                due.pop(block, None)

    def forget(self, replica: str) -> None:
        """Forget a replica that no longer exists."""
        self._due.pop(replica, None)

    def expire(self, now: float) -> Iterator[tuple[str, list[int]]]:
        """Yield (replica, blocks) for what expires by `now`, and for the oldest dispatches beyond the limit."""
        queue = self._queue
        while queue and (queue[0][0] <= now or self._num_queued > self._limit):
            until, replica, blocks = queue.popleft()
            self._num_queued -= len(blocks)
            due = self._due.get(replica)
            if due:
                # Blocks dispatched again since, or to a new replica of that name, expire later.
                gone = [block for block in blocks if due.get(block, until + 1) <= until]
                for block in gone:
                    due.pop(block, None)
                yield replica, gone
