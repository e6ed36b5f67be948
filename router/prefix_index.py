"""Index of cached prefixes: which replica holds how many leading blocks of a prompt, by the replicas' deltas.

    chain of a prompt      h0      h1      h2      h3            (cache/prefix_hash.py)
    holders, one bit each  0111    0111    0101    0001          one dictionary: hash -> mask
                            └── slot 1: 2 blocks ──┘  └ slot 0: 4 blocks, slot 2: 3

A replica holds a prefix whole or not at all, so holder sets shrink along a chain, and `match` bisects for the
borders between them.

Each replica has a slot, its bit. When a replica is removed, or a snapshot replaces all that is known of it, its
slot is dead at once: reads consider live bits only. A sweep of a few blocks with each change clears dead bits from
the masks; only then is a slot used again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from router.expected_blocks import ExpectedBlocks

SWEEP_STEP = 64
"""Blocks swept with each change, in addition to a multiple of the blocks in the change."""


class PrefixIndex:
    """Holders of prefix blocks. Not thread-safe. `max_blocks` bounds its memory; nothing else grows."""

    def __init__(
        self,
        block_tokens: int,
        max_blocks: int = 4_000_000,
        expect_s: float = 10.0,
        max_expected: int = 262_144,
    ) -> None:
        """`block_tokens` is the tokens of a block, the same as in the replicas.

        `max_blocks` limits the distinct blocks in memory, about 100 bytes each; further ones are dropped, and
        matches end there. `expect_s` is the seconds for which a dispatch counts while no delta confirms it.
        `max_expected` limits the blocks of such dispatches, about 100 bytes each; the oldest ones expire early.
        """
        limits = {"block_tokens": block_tokens, "max_blocks": max_blocks, "max_expected": max_expected}
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if expect_s < 0:
            raise ValueError(f"expect_s must be at least 0 seconds, got {expect_s}")
        self.block_tokens = block_tokens
        self.max_blocks = max_blocks
        self.num_dropped = 0
        """Blocks of deltas, snapshots and dispatches dropped because the index was full; only grows."""
        self._holders: dict[int, int] = {}
        self._order = array("Q")  # every key of `_holders` once, for the sweep; not seen by the garbage collector
        self._num_empty = 0  # blocks without a holder, until the sweep removes them
        self._slots: dict[str, int] = {}
        self._names: list[str] = []  # by slot
        self._live = 0
        self._dead = 0  # slots that died, not yet being swept
        self._swept = 0  # slots that the sweep now under way clears
        self._cursor = 0  # it moves down from the end of `_order`; 0: no sweep is under way
        self._free_slots: list[int] = []
        self._expected = ExpectedBlocks(expect_s, max_expected)

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks with a holder; those of dead slots count until they are swept."""
        return len(self._holders) - self._num_empty

    @property
    def replicas(self) -> list[str]:
        """Replicas of which anything is known."""
        return list(self._slots)

    # What replicas report

    def apply(self, replica: str, stored: Iterable[int], evicted: Iterable[int]) -> None:
        """Apply a delta: the replica holds `stored` from now on and `evicted` no longer. O(its blocks)."""
        bit = 1 << self._slot(replica)
        stored, evicted = list(stored), list(evicted)
        self._expected.settle(replica, stored)
        self._expected.settle(replica, evicted)
        self._add(bit, stored)
        self._discard(bit, evicted)
        self._sweep(SWEEP_STEP + 2 * (len(stored) + len(evicted)))

    def replace(self, replica: str, hashes: Iterable[int]) -> None:
        """Apply a snapshot: the replica holds exactly `hashes`; unconfirmed dispatches to it still count.

        O(len(hashes)): what it held before is dropped with its slot. Of a large snapshot in parts, pass the first
        part here and the others to `apply`.
        """
        if replica in self._slots:
            self._kill(replica)
        bit = 1 << self._slot(replica)
        hashes = list(hashes)
        self._expected.settle(replica, hashes)
        self._add(bit, hashes)
        self._add(bit, self._expected.of(replica))
        self._sweep(SWEEP_STEP + len(hashes) // 2)

    def forget(self, replica: str) -> None:
        """Remove a replica: matches no longer find it. O(blocks dispatched to it lately)."""
        if replica in self._slots:
            self._kill(replica)
            self._expected.forget(replica)
            self._sweep(SWEEP_STEP)

    # What this process does

    def expect(self, replica: str, chain: Sequence[int], now: float) -> None:
        """Expect that `replica` will hold the blocks of a prompt sent there; `now` is in seconds, never falling.

        They count at once and for `expect_s`, or until the replica confirms a block or reports its eviction.
        """
        self._expire(now)
        bit = 1 << self._slot(replica)
        get, is_expected = self._holders.get, self._expected.of(replica)
        unknown = [
            block
            for block, mask in zip(chain, map(get, chain), strict=True)
            if not mask or not mask & bit or block in is_expected
        ]
        self._expected.add(replica, unknown, now)
        self._add(bit, unknown)
        self._expire(now)  # The limit may have been exceeded: the oldest expire early.
        self._sweep(SWEEP_STEP)

    # What the router asks

    def match(self, chain: Sequence[int], now: float) -> dict[str, int]:
        """Count the leading blocks of `chain` that each replica holds or will hold; those without any are omitted.

        Bisects for the borders between sets of holders: O(borders * log(blocks)) dictionary look-ups, each of
        which may miss the processor's caches. Where a lost delta left holes in a set, it counts up to some block
        known to be there, at least up to the first hole: a replica that holds a block holds all before it.
        """
        self._expire(now)
        depths: dict[str, int] = {}
        if not chain:
            return depths
        get, live = self._holders.get, self._live
        last = len(chain) - 1
        at_first = (get(chain[0]) or 0) & live
        at_last = (get(chain[last]) or 0) & at_first
        spans = [(0, last, at_first, at_last)] if at_first & ~at_last else []
        while spans:
            low, high, at_low, at_high = spans.pop()
            if high - low == 1:
                self._note(depths, at_low & ~at_high, high)
                continue
            middle = (low + high) // 2
            at_middle = (get(chain[middle]) or 0) & live
            if at_middle & ~at_high:  # last in, first out: the deepest border is noted last
                spans.append((middle, high, at_middle, at_high))
            if at_low & ~at_middle:
                spans.append((low, middle, at_low, at_middle))
        self._note(depths, at_last, len(chain))
        return depths

    def _note(self, depths: dict[str, int], mask: int, depth: int) -> None:
        """Note that the replicas in `mask` hold `depth` blocks."""
        if not mask & (mask - 1):  # one, by far the most frequent, or none
            if mask and depth:
                depths[self._names[mask.bit_length() - 1]] = depth
        elif depth:
            for slot in _bits(mask):
                depths[self._names[slot]] = depth

    # Blocks

    def _add(self, bit: int, blocks: Iterable[int]) -> None:
        """Set the bit of these blocks. Blocks that shared one mask object share one afterwards."""
        holders, order, limit = self._holders, self._order, self.max_blocks
        get, append = holders.get, order.append
        before, after, grown = 0, bit, {0: bit}
        for block in blocks:
            mask = get(block)
            if mask is None:
                if len(holders) >= limit:
                    self.num_dropped += 1
                    continue
                append(block)
                holders[block] = bit
                continue
            if mask is not before:
                before, after = mask, grown.setdefault(mask, mask | bit)
            if not mask:
                self._num_empty -= 1
            holders[block] = after

    def _discard(self, bit: int, blocks: Iterable[int]) -> None:
        """Clear the bit of these blocks where it is set."""
        holders = self._holders
        get = holders.get
        shrunk: dict[int, int] = {}
        for block in blocks:
            mask = get(block)
            if mask is not None and mask & bit:
                holders[block] = left = shrunk.setdefault(mask, mask ^ bit)
                self._num_empty += not left

    def _expire(self, now: float) -> None:
        for replica, blocks in self._expected.expire(now):
            self._discard(1 << self._slots[replica], blocks)

    # Slots

    def _slot(self, replica: str) -> int:
        slot = self._slots.get(replica)
        if slot is None:
            if self._free_slots:
                slot = self._free_slots.pop()
                self._names[slot] = replica
            else:
                slot = len(self._names)
                self._names.append(replica)
            self._slots[replica] = slot
            self._live |= 1 << slot
        return slot

    def _kill(self, replica: str) -> None:
        bit = 1 << self._slots.pop(replica)
        self._live ^= bit
        self._dead |= bit

    def _sweep(self, num_blocks: int) -> None:
        """Clear dead bits from the next blocks and remove blocks without a holder. O(num_blocks).

        A pass moves down through `_order`: blocks added meanwhile lie behind it and need no clearing, as no block
        gets a dead bit.
        """
        holders, order = self._holders, self._order
        if not self._cursor and not self._begin_pass():
            return
        kept = ~self._swept
        stop = max(self._cursor - num_blocks, 0)
        for index in range(self._cursor - 1, stop - 1, -1):
            block = order[index]
            mask = holders[block]
            left = mask & kept
            if left:
                if left != mask:
                    holders[block] = left
                continue
            del holders[block]
            self._num_empty -= not mask
            last = order.pop()
            if index < len(order):
                order[index] = last  # swept already, or newer than this pass
        self._cursor = stop
        if not stop:
            self._free_slots.extend(_bits(self._swept))
            self._swept = 0

    def _begin_pass(self) -> bool:
        """Begin a pass if there is enough to sweep; return whether it began."""
        if not self._dead and self._num_empty <= max(len(self._order) // 8, SWEEP_STEP):
            return False
        self._swept, self._dead, self._cursor = self._dead, 0, len(self._order)
        return True


def _bits(mask: int) -> Iterator[int]:
    """Yield the positions of the set bits, lowest first."""
    digits = bin(mask)[:1:-1]
    position = digits.find("1")
    while position >= 0:
        yield position
        position = digits.find("1", position + 1)
