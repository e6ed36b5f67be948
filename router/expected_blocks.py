"""Blocks that replicas will hold because this process sent prompts there, until they say so themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from types import MappingProxyType

_NONE: Mapping[int, float] = MappingProxyType({})


class ExpectedBlocks:
    """Unconfirmed blocks by replica, each with the time at which it no longer counts."""

    def __init__(self, expect_s: float, limit: int) -> None:
        """`expect_s`: seconds a dispatch counts. `limit`: blocks of all dispatches that have not expired."""
        self._expect_s = expect_s
        self._limit = limit
        self._due: dict[str, dict[int, float]] = {}  # replica -> block -> when it expires, seconds
        self._queue: deque[tuple[float, str, list[int]]] = deque()  # dispatches, the first to expire first
        self._num_queued = 0

    def of(self, replica: str) -> Mapping[int, float]:
        """The replica's unconfirmed blocks, and when each expires."""
        return self._due.get(replica, _NONE)

    def add(self, replica: str, blocks: list[int], now: float) -> None:
        """Expect `blocks`, anew if they were expected before. O(len(blocks))."""
        if blocks:
            until = now + self._expect_s
            self._due.setdefault(replica, {}).update(zip(blocks, repeat(until)))
            self._queue.append((until, replica, blocks))
            self._num_queued += len(blocks)

    def settle(self, replica: str, blocks: Iterable[int]) -> None:
        """The replica itself has told of `blocks`: there is nothing left to expect."""
        due = self._due.get(replica)
        if due:
            for block in blocks:
                due.pop(block, None)

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        self._due.pop(replica, None)

    def expire(self, now: float) -> Iterator[tuple[str, list[int]]]:
        """Take out what is due by `now`, and the oldest dispatches while there are too many: (replica, blocks)."""
        queue = self._queue
        while queue and (queue[0][0] <= now or self._num_queued > self._limit):
            until, replica, blocks = queue.popleft()
            self._num_queued -= len(blocks)
            due = self._due.get(replica)
            if due:
                # What was dispatched again since, or to a new replica of that name, is due later.
                gone = [block for block in blocks if due.get(block, until + 1) <= until]
                for block in gone:
                    due.pop(block, None)
                yield replica, gone
