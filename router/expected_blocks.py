"""Blocks that replicas will hold because this process sent prompts there, until the replicas confirm them.

They are separate from blocks that replicas have reported: an expired dispatch takes nothing from what a replica
holds, and a prompt's hundreds of blocks are added and removed by a few operations on whole dictionaries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class ExpectedBlocks:
    """Unconfirmed blocks by replica, each with its time of expiry."""

    def __init__(self, expect_s: float, limit: int) -> None:
        """A dispatch counts for `expect_s` seconds; `limit` is the most blocks of unexpired dispatches."""
        self._expect_s = expect_s
        self._limit = limit
        self._due: dict[str, dict[int, float]] = {}  # replica -> block -> time of expiry, in seconds
        self._bits: dict[str, int] = {}  # replica -> its bit in the masks
        self._queue: deque[tuple[float, str, list[int]]] = deque()  # dispatches in order of expiry
        self._num_queued = 0
        self.masks: dict[int, int] = {}
        """The replicas at which each block is expected, one bit each; a block expected nowhere is omitted."""

    def add(self, replica: str, bit: int, blocks: list[int], now: float) -> None:
        """Expect `blocks`; those that were expected before expire later now. O(len(blocks)).

        `bit` stands for the replica in `masks`, until `move` or `forget`.
        """
        if not blocks:
            return
        until, masks = now + self._expect_s, self.masks
        self._bits[replica] = bit
        self._due.setdefault(replica, {}).update(dict.fromkeys(blocks, until))
        if masks.keys().isdisjoint(blocks):
            masks.update(dict.fromkeys(blocks, bit))
        else:
            get = masks.get
            masks.update([(block, get(block, 0) | bit) for block in blocks])
        self._queue.append((until, replica, blocks))
        self._num_queued += len(blocks)

    def settle(self, replica: str, blocks: Iterable[int]) -> None:
        """Stop expecting `blocks`: the replica itself has reported them."""
        due = self._due.get(replica)
        if due:
            self._drop(replica, due, due.keys() & blocks)

    def move(self, replica: str, bit: int) -> None:
        """Let another bit stand for a replica. O(blocks expected there)."""
        due, before = self._due.get(replica), self._bits.get(replica)
        if due and before is not None:
            masks = self.masks
            masks.update([(block, masks[block] ^ before | bit) for block in due])
            self._bits[replica] = bit

    def forget(self, replica: str) -> None:
        """Forget a replica that no longer exists. O(blocks expected there)."""
        due = self._due.get(replica)
        if due:
            self._drop(replica, due, list(due))

    def expire(self, now: float) -> None:
        """Stop expecting the blocks that expire by `now`, and the oldest dispatches beyond the limit."""
        queue = self._queue
        while queue and (queue[0][0] <= now or self._num_queued > self._limit):
            until, replica, blocks = queue.popleft()
            self._num_queued -= len(blocks)
            due = self._due.get(replica)
            if due:
                # Blocks dispatched again since, or to a new replica of that name, expire later.
                self._drop(replica, due, [block for block in due.keys() & blocks if due[block] <= until])

    def _drop(self, replica: str, due: dict[int, float], blocks: Iterable[int]) -> None:
        bit, masks = self._bits[replica], self.masks
        for block in blocks:
            del due[block]
            left = masks[block] ^ bit
            if left:
                masks[block] = left
            else:
                del masks[block]
        if not due:
            del self._due[replica], self._bits[replica]
