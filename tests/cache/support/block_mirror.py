"""A mirror of a cache, made of its events alone, and what it should show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cache import KVCacheManager
from cache.news.block_events import BlockChange, BlocksRemoved, BlocksStored
from cache.news.tier import Tier


@dataclass
class Mirror:
    """What a program knows that reads the events and nothing else."""

    block_tokens: int
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By block: the tokens of its prompt up to the block's end."""
    held: dict[Tier, set[int]] = field(default_factory=lambda: {tier: set() for tier in Tier})

    def read(self, changes: Iterable[BlockChange]) -> None:
        for change in changes:
            if change is None:
                self.held = {tier: set() for tier in Tier}
            elif isinstance(change, BlocksRemoved):
                assert self.held[change.tier] >= set(change.blocks)
                self.held[change.tier] -= set(change.blocks)
            else:
                self._store(change)

    def _store(self, change: BlocksStored) -> None:
        size, prompt = self.block_tokens, tuple[int, ...]()
        assert len(change.token_ids) == size * len(change.blocks)
        if change.parent is not None:
            assert change.tier is not Tier.DEVICE or change.parent in self.held[Tier.DEVICE], "parents come first"
            if change.parent not in self.prompts:  # it came, and went while its child went to the host
                self.held[change.tier] |= set(change.blocks)
                return
            prompt = self.prompts[change.parent]
        for index, block in enumerate(change.blocks):
            prompt += tuple(change.token_ids[index * size : (index + 1) * size])
            self.prompts[block] = prompt
        self.held[change.tier] |= set(change.blocks)


def prefixes(cache: KVCacheManager, block_tokens: int, salted: bool) -> set[tuple[int, ...]]:
    """By brute force: the prompts, cut to whole blocks, whose KV lies in the tree."""
    found: set[tuple[int, ...]] = set()
    stack = [
        (root, tuple[int, ...]()) for namespace, root in cache.tree.roots.items() if salted or not namespace.salt
    ]
    while stack:
        node, above = stack.pop()
        tokens: tuple[int, ...] = (*above, *node.tokens)
        found |= {tokens[:end] for end in range(block_tokens, len(tokens) + 1, block_tokens)}
        stack += [(child, tokens) for child in node.children.values()]
        stack += [(gate, tokens) for gate in (node.gates or {}).values() if salted]
    return found
