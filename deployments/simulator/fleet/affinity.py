"""Ray Serve LLM's PrefixCacheAffinityRouter, with its real prefix tree where Ray has it.

Its tree (ray.llm ... prefix_aware.prefix_tree.PrefixTree) is a plain class and is used unchanged. The class
around it needs a running Serve controller and an actor, so its rule is reimplemented from the documentation and
behaviour of Ray 2.60:

1. queue lengths differ by more than `imbalanced_threshold` (default infinity: never) -> power of two choices
2. less than `match_rate_threshold` (0.1) of the prompt found in the tree -> the replicas with the smallest trees
3. else all replicas that have the matched text
and, of the replicas named by a rule, the one with the shortest queue. The prompt goes into the tree when it is
routed; nothing ever leaves it by default. One tree serves all ingresses.

A block of the trace is a character of the tree, so a match is exact to a block instead of to a character.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from router.cost import Candidate, RouteQuery
from router.policies import Decision, Split
from router.ray_internals import prefix_tree

_SURROGATES = range(0xD800, 0xE000)
_MAX_BLOCKS = 0x110000 - len(_SURROGATES)


class AffinityPolicy:
    """One policy for the whole fleet: the tree is an actor that all routers ask (here it answers immediately)."""

    is_shared = True

    def __init__(self, imbalanced_threshold: float = math.inf, match_rate_threshold: float = 0.1) -> None:
        """Raises ValueError when Ray's tree cannot be imported."""
        self._imbalanced_threshold = imbalanced_threshold
        self._match_rate_threshold = match_rate_threshold
        self._tree = _new_tree()
        self._members: set[str] = set()
        self._characters: dict[int, str] = {}
        self._routed = 0.0  # the tree orders by time, for which prompts are counted

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Choose, and put the prompt into the tree."""
        split = Split(replicas)
        names = [candidate.replica for candidate in split.serving]
        self._update_members(names)
        queues = {candidate.replica: candidate.num_running for candidate in split.serving}
        text = "".join(map(self._character, query.chain))
        chosen = self._named(text, queues)
        if not chosen:
            chosen = rng.sample(names, min(2, len(names)))
        rng.shuffle(names)
        names.sort(key=lambda name: (name not in chosen, queues[name] if name in chosen else 0))
        if names and text:
            self._routed += 1.0
            self._tree.insert(text, names[0], self._routed)
        return split.decision(names, "rule", "affinity", query)

    def _named(self, text: str, queues: dict[str, int]) -> list[str]:
        """Return the replicas among which the shortest queue decides; empty: power of two."""
        if not text or not queues or max(queues.values()) - min(queues.values()) > self._imbalanced_threshold:
            return []
        matched, owners = self._tree.prefix_match(text, list(queues))
        if len(matched) / len(text) < self._match_rate_threshold:
            owners = self._tree.get_smallest_tenants()
        return [name for name in owners or () if name in queues]

    def _update_members(self, names: Sequence[str]) -> None:
        now = set(names)
        if now != self._members:
            self._tree.remove_tenants(sorted(self._members - now))
            self._tree.add_tenants(sorted(now - self._members), self._routed)
            self._members = now

    def _character(self, block: int) -> str:
        character = self._characters.get(block)
        if character is None:
            number = len(self._characters)
            if number >= _MAX_BLOCKS:
                raise ValueError(f"affinity's tree of characters can distinguish {_MAX_BLOCKS} blocks, not more")
            character = chr(number if number < _SURROGATES.start else number + len(_SURROGATES))
            self._characters[block] = character
        return character


def _new_tree() -> Any:
    try:
        return prefix_tree()
    except ImportError as error:
        raise ValueError(
            f"affinity needs the prefix tree of Ray 2.60 (ray.llm), which cannot be imported here: {error}"
        ) from None
