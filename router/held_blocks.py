"""Which replicas hold which blocks, as reported: each block has a mask with a bit for each replica's slot.

A replica that leaves, or whose blocks are replaced, gives up its slot. The slot is dead immediately, and reads
consider only live bits. A sweep of a few blocks with each change clears dead bits from the masks; only then is a
slot used again.

Only blocks that a living replica holds count against the bound. When it is full, a block that no prompt had goes:

    new ──▶ [ untried: oldest ....... newest ] ── no prompt had it ──▶ out
                  │ a prompt had it      ▲
                  ▼                      │ its mark is taken, when there are more of these than seven eighths
            [ useful: oldest ....... newest ]

So a flood of blocks without a reader replaces only its like, and a useful block must be used again to stay.

The masks are in many dictionaries, not in one: a growing dictionary moves all entries, which would stop an event
loop for a second at eleven million blocks. These are small, and have unequal shares of the blocks, so that each
grows at a different time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from router.block_queue import BlockQueue
from router.overlap import bits

SWEEP_STEP = 64
"""Blocks swept with each change, in addition to those that the change is worth."""
ROOM_STEPS = 1024
"""Most blocks looked at to make room with each change, in addition to one for each new block. If prompts had all
of these, the last of the new blocks are dropped."""
_USED = 1
"""The bit of a mask that says that a prompt had the block after it became known. It belongs to no slot."""
_NUM_SHARDS = 128
_PLACES = 65_536
_PLACE = _PLACES - 1
"""The bits of a block's hash that select its dictionary."""


def _shards() -> list[dict[int, int]]:
    """Return the dictionary of each place. The last dictionary has twice as many places as the first.

    A dictionary doubles its size when it grows. Shares that rise by a constant factor, from one half to all of the
    largest, make them grow in turn between two doublings. There are enough places that no two have the
    same share.
    """
    shares = [2 ** (number / _NUM_SHARDS) for number in range(_NUM_SHARDS)]
    bounds = [round(_PLACES * share / sum(shares)) for share in accumulate(shares)]
    shards: list[dict[int, int]] = []
    for bound in bounds:
        shards += [{}] * (bound - len(shards))
    return shards


class _NewMasks(dict[int, int]):
    """New masks by the masks before. Equal ones are one object, as it may be larger than the rest of an entry."""

    def __init__(self, change: Callable[[int], int]) -> None:
        self._change = change

    def __missing__(self, mask: int) -> int:
        self[mask] = changed = self._change(mask)
        return changed


class HeldBlocks:
    """A mask for each block. Not thread-safe. `max_blocks` bounds its memory; nothing else grows."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        """Most blocks with a holder. It may change; an excess is then removed little by little."""
        self.num_dropped = 0
        """Blocks that were forgotten, or not stored, because there were `max_blocks`; only grows."""
        self._shards = _shards()
        self._untried, self._useful = BlockQueue(), BlockQueue()  # every block of `_shards` is in one of them
        self._num_empty = 0  # blocks without a holder, until the sweep removes them
        self._num_sole: Counter[int] = Counter()  # slot's bit -> number of blocks that only this slot holds
        self._num_dead = 0  # number of blocks that only one dead slot holds
        self._num_slots = 1  # the first one is `_USED`
        self._free_slots: list[int] = []
        self._live = 0
        self._dead = 0  # slots that died and wait for a sweep
        self._swept = 0  # slots that the current sweep clears
        self._is_sweeping = False

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks with a holder. Those that lost several count too until they are swept."""
        return self._untried.num_blocks + self._useful.num_blocks - self._num_empty - self._num_dead

    @property
    def num_slots(self) -> int:
        """Number of slots, including free and dead ones."""
        return self._num_slots - 1

    # Slots

    def new_slot(self) -> int:
        """Return a slot that holds nothing: 1 or more."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
        self._live |= 1 << slot
        return slot

    def bury(self, slot: int) -> None:
        """Give up a slot with all that it holds. O(1): its blocks are swept later."""
        self._live ^= 1 << slot
        self._dead |= 1 << slot
        self._num_dead += self._num_sole[1 << slot]

    # Blocks

    def masks(self, expected: Mapping[int, int]) -> Callable[[int], int]:
        """Return the function from a block to the slots that hold it, one bit each, or those of `expected`.

        It is valid until the next change.
        """
        shards, live, soon = self._shards, self._live, expected.get

        def mask(block: int) -> int:
            return shards[block & _PLACE].get(block, 0) & live | soon(block, 0)

        return mask

    def add(self, slot: int, blocks: Sequence[int], *, makes_room: bool = True) -> None:
        """Let a slot hold these blocks. New ones replace others, or without `makes_room` use only free room."""
        shards, bit, new = self._shards, 1 << slot, list[int]()
        after, changed = _NewMasks(lambda mask: mask | bit), list[int]()
        room, steps = self.max_blocks - self.num_blocks, ROOM_STEPS + len(blocks)
        for block in blocks:
            shard = shards[block & _PLACE]
            mask = shard.get(block)
            if mask:
                shard[block] = after[mask]
                changed.append(mask)
                continue
            if room <= 0:
                if not makes_room:
                    self.num_dropped += 1
                    continue
                self._enter(bit, new)
                new = []
                room, steps = self._make_room(1 + min(self.max_blocks // 65536, 63), steps)
                if not room:
                    self.num_dropped += 1
                    continue
                mask = shard.get(block)  # an entry without a holder may have been removed
            room -= 1
            shard[block] = bit
            if mask is None:
                new.append(block)
            else:
                self._count(0, -1)
                self._count(bit, 1)
        self._recount(changed, after)
        self._enter(bit, new)

    def discard(self, slot: int, blocks: Iterable[int]) -> None:
        """Let a slot no longer hold these blocks, where it does."""
        shards, bit = self._shards, 1 << slot
        after, changed = _NewMasks(lambda mask: _held(mask ^ bit)), list[int]()
        for block in blocks:
            shard = shards[block & _PLACE]
            mask = shard.get(block)
            if mask and mask & bit:
                shard[block] = after[mask]
                changed.append(mask)
        self._recount(changed, after)

    def use(self, blocks: Iterable[int]) -> None:
        """Note that a prompt has these blocks: known ones stay longer than others.

        O(blocks), but O(1) while a quarter of the room is left, because no block has to go then.
        """
        if self.num_blocks <= self.max_blocks * 3 // 4:
            return
        shards, after = self._shards, _NewMasks(lambda mask: mask | _USED)
        for block in blocks:
            shard = shards[block & _PLACE]
            mask = shard.get(block)
            if mask and not mask & _USED:
                shard[block] = after[mask]

    def _enter(self, bit: int, blocks: Sequence[int]) -> None:
        """Queue blocks that are new."""
        if blocks:
            self._untried.extend(blocks)
            self._count(bit, len(blocks))

    # Room

    def sweep(self, num_more: int = 0) -> None:
        """Clear dead bits from some SWEEP_STEP + `num_more` blocks, and remove those without a holder.

        A pass looks through both queues. Blocks added meanwhile need no clearing, as no block gets a dead bit, and
        those that change queues are cleared as they do. It begins when a slot died or an eighth of the blocks has
        no holder. The excess over `max_blocks` is removed here too.
        """
        num_left = SWEEP_STEP + num_more
        if self.num_blocks > self.max_blocks:
            self._make_room(min(self.num_blocks - self.max_blocks, num_left), ROOM_STEPS)
        if not self._is_sweeping and not self._begin_pass():
            return
        for queue in (self._untried, self._useful):
            while not queue.is_swept:
                if num_left <= 0:
                    return
                num_left -= queue.sweep_piece(self._survivors)
        self._free_slots.extend(bits(self._swept))
        self._swept, self._is_sweeping = 0, False

    def _begin_pass(self) -> bool:
        """Begin a pass if there is enough to sweep; return whether it began."""
        if not self._dead and self._num_empty <= max(self.num_blocks // 8, SWEEP_STEP):
            return False
        self._swept, self._dead, self._is_sweeping = self._dead, 0, True
        self._untried.begin_sweep()
        self._useful.begin_sweep()
        return True

    def _survivors(self, piece: array[int]) -> array[int]:
        """Clear dead bits from the blocks of a piece, and remove those without a holder; return the others."""
        shards, kept, survivors = self._shards, ~self._swept, array("Q")
        after, changed = _NewMasks(lambda mask: _held(mask & kept)), list[int]()
        for block in piece:
            shard = shards[block & _PLACE]
            mask = shard[block]
            changed.append(mask)
            shard[block] = after[mask]
            if after[mask]:
                survivors.append(block)
            else:
                del shard[block]
        self._recount(changed, after)
        self._count(0, len(survivors) - len(piece))
        return survivors

    def _make_room(self, num_blocks: int, steps: int) -> tuple[int, int]:
        """Remove so many blocks that count and that no prompt had, looking at no more than `steps`.

        Return how many were removed, and how many steps are left.
        """
        shards, num_found, most_useful = self._shards, 0, self.max_blocks * 7 // 8
        while num_found < num_blocks and steps:
            steps -= 1
            if self._useful.num_blocks > most_useful or not self._untried.num_blocks:
                self._requeue(self._useful.popleft(), self._untried, ~_USED)
            block = self._untried.popleft()
            shard = shards[block & _PLACE]
            mask = shard[block]
            if mask & _USED:
                self._requeue(block, self._useful, ~0)
                continue
            del shard[block]
            self._count(mask, -1)
            if self._counts(mask):
                num_found += 1
                self.num_dropped += bool(mask & self._live)
        return num_found, steps

    def _requeue(self, block: int, queue: BlockQueue, kept: int) -> None:
        """Append a block to a queue, with the bits `kept` of its mask except those being swept."""
        shard = self._shards[block & _PLACE]
        mask = shard[block]
        shard[block] = left = _held(mask & kept & ~self._swept)
        self._count(mask, -1)
        self._count(left, 1)
        queue.extend((block,))

    # Counts

    def _counts(self, mask: int) -> bool:
        """Return whether a block with this mask counts as one with a holder."""
        return bool(mask) and not _only_slot(mask) & (self._dead | self._swept)

    def _recount(self, changed: Iterable[int], after: Mapping[int, int]) -> None:
        """Update the counts for blocks whose masks changed from these to those of `after`."""
        for mask, num_blocks in Counter(changed).items():
            self._count(mask, -num_blocks)
            self._count(after[mask], num_blocks)

    def _count(self, mask: int, num_blocks: int) -> None:
        """Add blocks to the count of their mask; a negative number removes them."""
        if not mask:
            self._num_empty += num_blocks
        elif only := _only_slot(mask):
            self._num_sole[only] += num_blocks
            if only & (self._dead | self._swept):
                self._num_dead += num_blocks


def _held(mask: int) -> int:
    """Return a mask, or 0 if it has no slot: a block that is only marked as used has no holder."""
    return mask if mask != _USED else 0


def _only_slot(mask: int) -> int:
    """Return the bit of the only slot in a mask; 0 where there are several."""
    slots = mask & ~_USED
    return slots if not slots & (slots - 1) else 0
