"""Which replica holds how much of a prompt: block hashes and who has them, as their deltas told.

    chain of a prompt      h0      h1      h2      h3            (cache/prefix_hash.py)
    holders, one bit each  0111    0111    0101    0001          one dictionary: hash -> mask
                            └── slot 1: 2 blocks ──┘  └ slot 0: 4 blocks, slot 2: 3

A replica holds a prefix whole or not at all, so holder sets shrink along a chain, and `match` bisects for where
they do.

Each replica has a slot, its bit. When a replica goes, or a snapshot replaces all that is known of it, its slot is
dead at once: reads see live bits only. A sweep, a few blocks with each change, clears dead bits out of the masks,
and only then is a slot used again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from router.expected_blocks import ExpectedBlocks

SWEEP_STEP = 64
"""Blocks swept with each change, beside some for each of the blocks that it tells of."""


class PrefixIndex:
    """Blocks of prefixes by replica. Not thread-safe. Memory: see `max_blocks`; nothing else grows."""

    def __init__(
        self,
        block_tokens: int,
        max_blocks: int = 4_000_000,
        expect_s: float = 10.0,
        max_expected: int = 262_144,
    ) -> None:
        """`block_tokens`: tokens of a block, the same as in the replicas.

        `max_blocks`: distinct blocks kept in memory, of about 100 bytes each; more are not taken in, and matches
        end there. `expect_s`: seconds for which a dispatch counts while no delta confirms it. `max_expected`:
        blocks of dispatches remembered for that, about 100 bytes each; beyond that the oldest dispatches go early.
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
        """Blocks of deltas, snapshots and dispatches not taken in because the index was full; only grows."""
        self._holders: dict[int, int] = {}
        self._order = array("Q")  # every key of `_holders` once, for the sweep; not seen by the garbage collector
        self._num_empty = 0  # blocks that nobody holds, until the sweep takes them out
        self._slots: dict[str, int] = {}
        self._names: list[str] = []  # by slot
        self._live = 0
        self._dead = 0  # slots that died, not yet being swept
        self._swept = 0  # slots that the sweep now under way clears
        self._cursor = 0  # it goes down from the end of `_order`; 0: none is under way
        self._free_slots: list[int] = []
        self._expected = ExpectedBlocks(expect_s, max_expected)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that some replica holds, those of dead slots included until they are swept."""
        return len(self._holders) - self._num_empty

    @property
    def replicas(self) -> list[str]:
        """Replicas that something was told of."""
        return list(self._slots)

    # What replicas tell

    def apply(self, replica: str, stored: Iterable[int], evicted: Iterable[int]) -> None:
        """A delta: the replica holds `stored` from now on, and `evicted` no more. O(its blocks)."""
        bit = 1 << self._slot(replica)
        stored, evicted = list(stored), list(evicted)
        self._expected.settle(replica, stored)
        self._expected.settle(replica, evicted)
        self._add(bit, stored)
        self._discard(bit, evicted)
        self._sweep(SWEEP_STEP + 2 * (len(stored) + len(evicted)))

    def replace(self, replica: str, hashes: Iterable[int]) -> None:
        """A snapshot: the replica holds exactly `hashes`, and what was dispatched to it still counts.

        O(len(hashes)): what it held before dies with its slot. A large snapshot may come in parts, the first
        here and the others by `apply`.
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
        """The replica is gone: nothing is found there any more. O(blocks dispatched to it lately)."""
        if replica in self._slots:
            self._kill(replica)
            self._expected.forget(replica)
            self._sweep(SWEEP_STEP)

    # What this process does

    def expect(self, replica: str, chain: Sequence[int], now: float) -> None:
        """A prompt was dispatched to `replica`, which will hold its blocks; `now` in seconds, never falling.

        Counts at once, and for `expect_s` unless the replica confirms a block or says that it evicted it.
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
        self._expire(now)  # The oldest may have to go before their time.
        self._sweep(SWEEP_STEP)

    # What the router asks

    def match(self, chain: Sequence[int], now: float) -> dict[str, int]:
        """Leading blocks of `chain` that each replica holds or will hold; replicas without any are left out.

        Bisects for the borders between sets of holders: O(borders * log(blocks)) dictionary look-ups, each of
        which may miss the processor's caches. Where news was lost and a set has holes, it counts up to some block
        that is known to be there, at least up to the first hole: whoever holds a block holds all before it.
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
        """The replicas in `mask` hold `depth` blocks."""
        if not mask & (mask - 1):  # one, by far the most frequent, or none
            if mask and depth:
                depths[self._names[mask.bit_length() - 1]] = depth
        elif depth:
            for slot in _bits(mask):
                depths[self._names[slot]] = depth

    # Blocks

    def _add(self, bit: int, blocks: Iterable[int]) -> None:
        """Set the bit. Blocks that had the same holders share one mask afterwards too."""
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
        """Clear the bit where it is set."""
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
        """Clear dead bits out of the next blocks, and take out those that nobody holds any more.

        A pass goes down through `_order`: what is added meanwhile lies behind it and needs no clearing, as no
        block gets a dead bit. O(num_blocks).
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
        """Whether there is enough to sweep."""
        if not self._dead and self._num_empty <= max(len(self._order) // 8, SWEEP_STEP):
            return False
        self._swept, self._dead, self._cursor = self._dead, 0, len(self._order)
        return True


def _bits(mask: int) -> Iterator[int]:
    """Positions of the bits that are set."""
    digits = bin(mask)[:1:-1]
    position = digits.find("1")
    while position >= 0:
        yield position
        position = digits.find("1", position + 1)
