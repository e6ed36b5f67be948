"""Events of the blocks that a cache holds, with their tokens, for programs that do not know Raydix's hashes.

    engine's thread     store, evict, keep, drop ──▶ notes      an append for each change, nothing else
    another thread      drain ◀── notes folded into what is held in each tier ──▶ what has changed since

A drain returns the difference to the last one, so a late reader finds no more than the cache holds, and no event
has to be dropped for a slow one. Memory: the held blocks, about 300 bytes and the tokens of each, and `MAX_NOTES`
notes.

Salted blocks are left out by default, because their tokens are private to a tenant.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from cache.news.tier import Tier
from cache.node import Namespace

MAX_NOTES = 4096
"""Changes that wait for a reader; at more, the engine's thread folds them itself."""


class BlocksStored(NamedTuple):
    """Blocks that continue each other and lie in a tier from now on."""

    tier: Tier
    blocks: list[int]
    parent: int | None
    """The block before the first; None if that begins a prompt."""
    token_ids: list[int]
    """The tokens of all blocks."""
    salt: str


class BlocksRemoved(NamedTuple):
    """Blocks that lie in a tier no longer."""

    tier: Tier
    blocks: list[int]


BlockChange = BlocksStored | BlocksRemoved | None
"""None: nothing is held any more, or the reader shall forget what it knows."""


class _Note(NamedTuple):
    kind: Literal["store", "evict", "keep", "drop"]
    blocks: Sequence[int]
    tier: Tier = Tier.DEVICE
    parent: int | None = None
    tokens: array[int] | None = None
    salt: str = ""


class _Block:
    __slots__ = ("held", "parent", "salt", "tokens", "told")

    def __init__(self, parent: int | None, tokens: bytes, salt: str) -> None:
        self.parent, self.tokens, self.salt = parent, tokens, salt
        self.held = self.told = 0  # a bit for each tier


class BlockEvents:
    """Follows a cache's blocks. The methods that note a change belong to the engine's thread, others to one."""

    def __init__(self, block_tokens: int, include_salted: bool = False) -> None:
        self.block_tokens = block_tokens
        self._include_salted = include_salted
        self._notes: deque[_Note] = deque()
        self._folding = threading.Lock()
        self._blocks: dict[int, _Block] = {}  # held, or reported; on the device, parents come first
        self._changed: dict[int, None] = {}  # blocks changed since the last drain, in the order of storing
        self._num_told = 0

    # --- the engine's thread -------------------------------------------------------------------------------

    def store(self, namespace: Namespace, parent: int | None, blocks: Sequence[int], tokens: array[int]) -> None:
        """Note blocks that the device holds from now on. `tokens` begins with theirs and does not change."""
        if self._include_salted or not namespace.salt:
            self._note(_Note("store", blocks, Tier.DEVICE, parent, tokens, namespace.salt))

    def evict(self, blocks: Sequence[int]) -> None:
        """Note blocks that the device holds no longer; like those of `keep` and `drop`, they may be unknown."""
        self._note(_Note("evict", blocks))

    def keep(self, blocks: Sequence[int], tier: Tier) -> None:
        """Note blocks that were stored and lie in a lower tier as well."""
        self._note(_Note("keep", blocks, tier))

    def drop(self, blocks: Sequence[int], tier: Tier) -> None:
        """Note blocks that a lower tier holds no longer."""
        self._note(_Note("drop", blocks, tier))

    def _note(self, note: _Note) -> None:
        if note.blocks:
            self._notes.append(note)
            # A reader that holds the lock is folding: the engine never waits for it.
            if len(self._notes) >= MAX_NOTES and self._folding.acquire(blocking=False):
                try:
                    self._fold()
                finally:
                    self._folding.release()

    # --- the reader's thread -------------------------------------------------------------------------------

    def drain(self) -> list[BlockChange]:
        """Return what has changed since the last call, what was removed first. O(changes)."""
        with self._folding:
            self._fold()
            changed, self._changed = self._changed, {}
            removed: dict[Tier, list[int]] = {}
            stored: dict[Tier, list[int]] = {}
            num_before = self._num_told
            for number in changed:
                block = self._blocks[number]
                for tier in Tier:
                    bit = 1 << tier
                    if block.told & ~block.held & bit:
                        removed.setdefault(tier, []).append(number)
                    elif block.held & ~block.told & bit:
                        stored.setdefault(tier, []).append(number)
                self._num_told += bool(block.held) - bool(block.told)
                block.told = block.held
            changes: list[BlockChange] = [BlocksRemoved(tier, removed[tier]) for tier in sorted(removed)]
            changes += [None] if num_before and not self._num_told else self._runs(stored)
            for number in changed:
                if not self._blocks[number].held:
                    del self._blocks[number]
            return changes

    def snapshot(self) -> list[BlockChange]:
        """Return all that was told and is held, after a None. O(blocks)."""
        with self._folding:
            held = {
                tier: [number for number, one in self._blocks.items() if one.told >> tier & 1] for tier in Tier
            }
            return [None, *self._runs(held)]

    def _runs(self, stored: dict[Tier, list[int]]) -> Iterator[BlocksStored]:
        """Group blocks that continue each other, the device's first."""
        for tier in sorted(stored):
            run: list[int] = []
            for number in stored[tier]:
                block = self._blocks[number]
                if run and not (block.parent == run[-1] and block.salt == self._blocks[run[-1]].salt):
                    yield self._run(tier, run)
                    run = []
                run.append(number)
            if run:
                yield self._run(tier, run)

    def _run(self, tier: Tier, run: list[int]) -> BlocksStored:
        first, tokens = self._blocks[run[0]], array("i")
        for number in run:
            tokens.frombytes(self._blocks[number].tokens)
        return BlocksStored(tier, run, first.parent, tokens.tolist(), first.salt)

    # --- both ----------------------------------------------------------------------------------------------

    def _fold(self) -> None:
        while self._notes:
            note = self._notes.popleft()
            if note.kind == "store":
                self._fold_stored(note)
                continue
            bit = 1 << note.tier
            for number in note.blocks:
                block = self._blocks.get(number)
                if block is None:
                    continue
                block.held = block.held | bit if note.kind == "keep" else block.held & ~bit
                if block.held or block.told:
                    self._changed.setdefault(number)
                else:
                    del self._blocks[number], self._changed[number]  # no reader knows this block

    def _fold_stored(self, note: _Note) -> None:
        assert note.tokens is not None
        parent, size = note.parent, self.block_tokens
        for index, number in enumerate(note.blocks):
            # Move it to the end, so that it comes after its parent.
            block = self._blocks.pop(number, None)
            if block is None:
                tokens = note.tokens[index * size : (index + 1) * size].tobytes()
                block = _Block(parent, tokens, note.salt)
            self._blocks[number] = block
            block.held |= 1 << Tier.DEVICE
            self._changed.pop(number, None)
            self._changed[number] = None
            parent = number
