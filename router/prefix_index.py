"""Index of cached prefixes: which replica holds how many leading blocks of a prompt, from the replicas' deltas.

    chain of a prompt      h0      h1      h2      h3            (cache/prefix_hash.py)
    holders, one bit each  0111    0111    0101    0001          what replicas reported | what they were sent
                            └── slot 1: 2 blocks ──┘  └ slot 0: 4 blocks, slot 2: 3

A replica holds a prefix completely or not at all, so holder sets shrink along a chain, and `match` bisects for the
borders between them.

A store of files that replicas share has a slot like theirs, so that a block in it is reported and kept once, not
once for each of its readers. No prompt can be placed there: matches omit stores, and `reach` looks into one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from router.addresses import is_store
from router.expected_blocks import ExpectedBlocks
from router.held_blocks import HeldBlocks
from router.lower_tiers import LowerTiers
from router.overlap import Level, Levels, OutdatedOverlap, Overlap


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

        `max_blocks` limits the distinct blocks that replicas hold, about 100 bytes each; further ones replace
        those that were least useful. `expect_s` is the seconds for which a dispatch counts while no delta
        confirms it. `max_expected` limits the blocks of such dispatches, about 200 bytes each; the oldest expire
        early.
        """
        limits = {"block_tokens": block_tokens, "max_blocks": max_blocks, "max_expected": max_expected}
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if expect_s < 0:
            raise ValueError(f"expect_s must be at least 0 seconds, got {expect_s}")
        self.block_tokens = block_tokens
        self._held = HeldBlocks(max_blocks)
        self._expected = ExpectedBlocks(expect_s, max_expected)
        self._lower = LowerTiers()
        # Matches refer to these two, so they are replaced and never changed.
        self._slots: dict[str, int] = {}
        self._names: list[str] = [""]  # indexed by slot; slots begin at 1
        self._stores = 0  # the slots of stores, one bit each
        self._version = 0  # changes whenever the holders of a block change

    @property
    def max_blocks(self) -> int:
        """Most distinct blocks that replicas hold. The excess over a lower value is removed little by little."""
        return self._held.max_blocks

    @max_blocks.setter
    def max_blocks(self, value: int) -> None:
        self._held.max_blocks = value

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks that replicas have reported and hold, or held until a moment ago."""
        return self._held.num_blocks

    @property
    def num_dropped(self) -> int:
        """Blocks that were forgotten, or not stored, because the index was full; only grows."""
        return self._held.num_dropped

    @property
    def num_slots(self) -> int:
        """Number of bits in a mask of holders, which is bounded by the number of recent replicas."""
        return self._held.num_slots

    @property
    def replicas(self) -> list[str]:
        """Replicas and stores of which any block is known."""
        return list(self._slots)

    # Reports of replicas

    def apply(self, replica: str, stored: Iterable[int], evicted: Iterable[int]) -> None:
        """Apply a delta: the replica holds `stored` from now on and `evicted` no longer. O(its blocks)."""
        self._version += 1
        slot = self._slot(replica)
        stored, evicted = list(stored), list(evicted)
        self._expected.settle(replica, stored)
        self._expected.settle(replica, evicted)
        self._held.add(slot, stored)
        self._held.discard(slot, evicted)
        self._lower.forget(replica, [*stored, *evicted])
        self._held.sweep(2 * (len(stored) + len(evicted)))

    def place_in_tiers(self, replica: str, blocks: Iterable[int], tiers: Iterable[int]) -> None:
        """Note the fastest tier (cache/news/tier.py) of each of some blocks that the replica holds. O(its blocks).

        A stored block counts as on the device until then.
        """
        self._version += 1
        self._lower.put(replica, blocks, tiers, self.max_blocks)

    def replace(self, replica: str, hashes: Iterable[int]) -> None:
        """Apply a snapshot: the replica holds exactly `hashes`; unconfirmed dispatches to it still count.

        O(len(hashes)): what it held before is dropped with its slot. Pass the first part of a large snapshot
        here and the others to `extend`.
        """
        self._version += 1
        if replica in self._slots:
            self._bury(replica)
        self._lower.drop(replica)
        slot = self._slot(replica)
        hashes = list(hashes)
        self._expected.settle(replica, hashes)
        self._expected.move(replica, 1 << slot)
        self._held.add(slot, hashes)
        self._held.sweep(len(hashes) // 2)

    def extend(self, replica: str, hashes: Iterable[int]) -> None:
        """Apply a further part of a snapshot: the replica holds `hashes` too. O(len(hashes)).

        It replaces no other block in a full index, because the parts before it, of all replicas, were used later.
        """
        self._version += 1
        slot, hashes = self._slot(replica), list(hashes)
        self._expected.settle(replica, hashes)
        self._held.add(slot, hashes, makes_room=False)
        self._held.sweep(2 * len(hashes))

    def forget(self, replica: str) -> None:
        """Remove a replica: matches no longer find it. O(blocks dispatched to it lately)."""
        if replica in self._slots:
            self._version += 1
            self._bury(replica)
            self._lower.drop(replica)
            self._expected.forget(replica)
            self._held.sweep()

    # Actions of this process

    def expect(self, replica: str, chain: Sequence[int], now: float) -> None:
        """Expect that `replica` will hold the blocks of a prompt sent there; `now` is in seconds, never falling.

        Those that it does not hold count from now for `expect_s`, or until the replica confirms a block or
        reports its eviction. Bisects for the first of them: O(log(blocks)) look-ups and O(blocks) copying. A full
        index may have forgotten a prompt's beginning, without which the rest is not found: then all are expected.
        """
        self._version += 1
        bit = 1 << self._slot(replica)
        mask = self._held.masks({})
        num_held = _border(mask, bit, chain, 0, len(chain)) if chain and mask(chain[0]) & bit else 0
        self._expected.add(replica, bit, list(chain[num_held:]), now)
        self._expected.expire(now)
        self._held.sweep()

    def use(self, chain: Iterable[int]) -> None:
        """Note that a prompt with these blocks has come: a full index keeps the blocks that prompts share longest.

        O(blocks), but O(1) while a quarter of the room is left.
        """
        self._held.use(chain)

    # Questions of the router

    def match(self, chain: Sequence[int], now: float) -> Overlap:
        """Count the leading blocks of `chain` that each replica holds or will hold; those without any are omitted.

        Bisects on demand for the borders between sets of holders, O(log(blocks)) look-ups for each, which may miss
        the processor's caches; so the overlap must be read before the index changes. Where a lost delta left holes
        in a set, it counts up to some block known to be there, at least up to the first hole: a replica that holds
        a block holds all before it.
        """
        self._expected.expire(now)
        levels = Levels(()) if not chain else self._levels(chain)
        if self._lower.is_empty:
            return Overlap(levels, self._slots, self._names)
        version = self._version
        below = self._lower.finder(chain, lambda: self._check(version))
        return Overlap(levels, self._slots, self._names, below=below)

    def reach(self, name: str, chain: Sequence[int], first: int) -> int:
        """Return how many leading blocks of `chain` can be read: the `first` ones, which the caller has, and those
        that follow in a store, or in what a replica has reported.

        O(log(blocks)). Files are given up one by one, so a store may have gaps: this finds an end of a run in it,
        perhaps one before a gap. It is advice, like all of the index.
        """
        slot = self._slots.get(name)
        if slot is None or first >= len(chain):
            return first
        mask, bit = self._held.masks({}), 1 << slot
        if not mask(chain[first]) & bit:
            return first
        return len(chain) if mask(chain[-1]) & bit else _border(mask, bit, chain, first + 1, len(chain) - 1)

    def _levels(self, chain: Sequence[int]) -> Levels:
        mask, last, version = self._held.masks(self._expected.masks), len(chain) - 1, self._version
        at_first = mask(chain[0]) & ~self._stores
        at_last = mask(chain[last]) & at_first

        def found() -> Iterator[Level]:
            if at_last:
                yield len(chain), at_last
            seen = at_last
            spans = [(0, last, at_first, at_last)] if at_first & ~at_last else []
            while spans:
                self._check(version)
                low, high, at_low, at_high = spans.pop()
                if high - low == 1:
                    if holders := at_low & ~at_high & ~seen:  # a replica counts at its deepest
                        seen |= holders
                        yield high, holders
                    continue
                middle = (low + high) // 2
                at_middle = mask(chain[middle]) & at_first  # without replicas that lack the first block
                if at_low & ~at_middle:
                    spans.append((low, middle, at_low, at_middle))
                if at_middle & ~at_high:  # last in, first out: the deepest is found first
                    spans.append((middle, high, at_middle, at_high))

        def depth(slot: int) -> int:
            """Bisect as `found` does, but for one slot: O(log(blocks))."""
            self._check(version)
            bit = 1 << slot
            if not at_first & bit:
                return 0
            return len(chain) if at_last & bit else _border(mask, bit, chain, 1, last)

        return Levels(found(), depth)

    def _check(self, version: int) -> None:
        if version != self._version:
            raise OutdatedOverlap(
                "the index has changed since this overlap was made: copy it with dict to keep it"
            )

    # Slots

    def _slot(self, replica: str) -> int:
        slot = self._slots.get(replica)
        if slot is None:
            slot = self._held.new_slot()
            self._slots = {**self._slots, replica: slot}
            if is_store(replica):
                self._stores |= 1 << slot
            self._names = [*self._names[:slot], replica, *self._names[slot + 1 :]]
        return slot

    def _bury(self, replica: str) -> None:
        self._held.bury(self._slots[replica])
        self._stores &= ~(1 << self._slots[replica])
        self._slots = {name: slot for name, slot in self._slots.items() if name != replica}


def _border(mask: Callable[[int], int], bit: int, chain: Sequence[int], low: int, high: int) -> int:
    """Return the first block of `chain` from `low` on whose mask lacks a bit; `high` if there is none before it.

    Bisects, because a replica that lacks a block lacks all after it: O(log(high - low)) look-ups.
    """
    return low + bisect_left(range(low, high), True, key=lambda at: not mask(chain[at]) & bit)
