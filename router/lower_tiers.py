"""Which of the blocks that replicas hold are not on their devices, and in which slower tier they are.

    chain of a prompt     h0      h1      h2      h3      h4
    one replica has it    device  device  host    host    -          below = (2,): two blocks to load from the host

A replica's device holds a prefix completely or not at all, so the part in lower tiers ends each prompt: its
beginning is found by bisection. Replicas without slower tiers cost nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

Below = tuple[int, ...]
"""Blocks, or tokens, in each tier below the device, the fastest first; shorter where slower tiers have none."""


class LowerTiers:
    """The tiers of blocks below the devices. Not thread-safe. About 100 bytes a block; the number is bounded."""

    def __init__(self) -> None:
        self._tiers: dict[str, dict[int, int]] = {}  # replica -> block -> tier, where it has any
        self.num_blocks = 0
        """Blocks below the devices, counted once for each replica that has them."""

    @property
    def is_empty(self) -> bool:
        """Whether everything is on the devices."""
        return not self._tiers

    def put(self, replica: str, blocks: Iterable[int], tiers: Iterable[int], max_blocks: int) -> None:
        """Note the fastest tier of each block, 0 for the device. Beyond `max_blocks`, all counts as on the device.

        O(blocks).
        """
        of_replica = self._tiers.setdefault(replica, {})
        before = len(of_replica)
        for block, tier in zip(blocks, tiers, strict=True):
            if not tier:
                of_replica.pop(block, None)
            elif block in of_replica or self.num_blocks - before + len(of_replica) < max_blocks:
                of_replica[block] = tier
        self.num_blocks += len(of_replica) - before
        if not of_replica:
            del self._tiers[replica]

    def forget(self, replica: str, blocks: Iterable[int]) -> None:
        """Note that blocks are on the device, or nowhere. O(blocks), or O(1) where none was lower."""
        of_replica = self._tiers.get(replica)
        if of_replica:
            self.put(replica, blocks := list(blocks), [0] * len(blocks), 0)

    def drop(self, replica: str) -> None:
        """Forget a replica."""
        self.num_blocks -= len(self._tiers.pop(replica, ()))

    def finder(self, chain: Sequence[int], check: Callable[[], None]) -> Callable[[str, int], Below]:
        """Return the function from a replica, and how many blocks of `chain` it holds, to those below its device.

        It bisects, O(log(blocks)) for each tier, after it has called `check`.
        """

        def below(replica: str, depth: int) -> Below:
            check()
            tiers = self._tiers.get(replica)
            if not tiers:
                return ()
            found: list[int] = []
            at = _first_above(tiers, chain, 0, depth, 0)
            while at < depth:
                end = _first_above(tiers, chain, at, depth, len(found) + 1)
                found.append(end - at)
                at = end
            return tuple(found)

        return below


def _first_above(tiers: dict[int, int], chain: Sequence[int], low: int, high: int, tier: int) -> int:
    """Return the first position, from `low`, of a block below a tier; `high` if there is none before it."""
    if low < high and tiers.get(chain[high - 1], 0) <= tier:
        return high
    return low + bisect_left(range(low, high), True, key=lambda at: tiers.get(chain[at], 0) > tier)
