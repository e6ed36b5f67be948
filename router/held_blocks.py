"""Which replicas hold which blocks, as they have reported: a mask for each block, a bit for each replica's slot.

A replica that leaves, or whose blocks are replaced, gives up its slot: the slot is dead at once, and reads
consider live bits only. A sweep of a few blocks with each change clears dead bits from the masks; only then is a
slot used again.

The masks lie in many dictionaries, not in one: a dictionary that grows moves all it has, which would stop an event
loop for a fifth of a second at three million blocks. These are small, and each grows at another time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping

from router.overlap import bits

SWEEP_STEP = 64
"""Blocks swept with each change, in addition to those that the change is worth."""
_NUM_SHARDS = 128
_SHARD = _NUM_SHARDS - 1
"""The bits of a block's hash that say in which dictionary it lies."""


class HeldBlocks:
    """A mask for each block. Not thread-safe. `max_blocks` bounds its memory; nothing else grows."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_dropped = 0
        """Blocks dropped because there were `max_blocks`; only grows."""
        self._shards: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._order = array("Q")  # every block of `_shards` once, for the sweep; not seen by the garbage collector
        self._num_empty = 0  # blocks without a holder, until the sweep removes them
        self._num_slots = 0
        self._free_slots: list[int] = []
        self._live = 0
        self._dead = 0  # slots that died, not yet being swept
        self._swept = 0  # slots that the sweep now under way clears
        self._cursor = 0  # it moves down from the end of `_order`; 0: no sweep is under way

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks with a holder; those of dead slots count until they are swept."""
        return len(self._order) - self._num_empty

    @property
    def num_slots(self) -> int:
        """Number of slots, those included that are free or dead."""
        return self._num_slots

    def new_slot(self) -> int:
        """Return a slot that holds nothing."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
        self._live |= 1 << slot
        return slot

    def bury(self, slot: int) -> None:
        """Give up a slot with all that it holds. O(1): what it holds is swept later."""
        self._live ^= 1 << slot
        self._dead |= 1 << slot

    def masks(self, expected: Mapping[int, int]) -> Callable[[int], int]:
        """Return the function from a block to the slots that hold it, one bit each, or those of `expected`.

        It is valid until the next change.
        """
        shards, live, soon = self._shards, self._live, expected.get

        def mask(block: int) -> int:
            return shards[block & _SHARD].get(block, 0) & live | soon(block, 0)

        return mask

    def add(self, slot: int, blocks: Iterable[int]) -> None:
        """Let a slot hold these blocks. Blocks that shared one mask object share one afterwards."""
        shards, order, limit = self._shards, self._order, self.max_blocks
        append, bit = order.append, 1 << slot
        before, after, grown = 0, bit, {0: bit}
        for block in blocks:
            shard = shards[block & _SHARD]
            mask = shard.get(block)
            if mask is None:
                if len(order) >= limit:
                    self.num_dropped += 1
                    continue
                append(block)
                shard[block] = bit
                continue
            if mask is not before:
                before, after = mask, grown.setdefault(mask, mask | bit)
            if not mask:
                self._num_empty -= 1
            shard[block] = after

    def discard(self, slot: int, blocks: Iterable[int]) -> None:
        """Let a slot hold these blocks no longer, where it does."""
        shards, bit = self._shards, 1 << slot
        shrunk: dict[int, int] = {}
        for block in blocks:
            shard = shards[block & _SHARD]
            mask = shard.get(block)
            if mask is not None and mask & bit:
                shard[block] = left = shrunk.setdefault(mask, mask ^ bit)
                self._num_empty += not left

    def sweep(self, num_more: int = 0) -> None:
        """Clear dead bits from the next SWEEP_STEP + `num_more` blocks, and remove those without a holder.

        A pass moves down through `_order`: blocks added meanwhile lie behind it and need no clearing, as no block
        gets a dead bit. It begins when a slot died or an eighth of the blocks has no holder.
        """
        shards, order = self._shards, self._order
        if not self._cursor and not self._begin_pass():
            return
        kept = ~self._swept
        stop = max(self._cursor - SWEEP_STEP - num_more, 0)
        for index in range(self._cursor - 1, stop - 1, -1):
            block = order[index]
            shard = shards[block & _SHARD]
            mask = shard[block]
            left = mask & kept
            if left:
                if left != mask:
                    shard[block] = left
                continue
            del shard[block]
            self._num_empty -= not mask
            last = order.pop()
            if index < len(order):
                order[index] = last  # swept already, or newer than this pass
        self._cursor = stop
        if not stop:
            self._free_slots.extend(bits(self._swept))
            self._swept = 0

    def _begin_pass(self) -> bool:
        """Begin a pass if there is enough to sweep; return whether it began."""
        if not self._dead and self._num_empty <= max(len(self._order) // 8, SWEEP_STEP):
            return False
        self._swept, self._dead, self._cursor = self._dead, 0, len(self._order)
        return True
