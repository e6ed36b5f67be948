"""Ray Serve LLM's KVAwareRouter (alpha in Ray 2.60), which asks Dynamo's selection service for the replica.

Ray's class itself only asks that service, a compiled library of the package ai-dynamo, which `ray[llm]` does not
include, so its rule is reimplemented here from Dynamo's documentation and source, with the defaults that Ray
keeps; the service of ai-dynamo-runtime 1.6.1 chose the same in every comparison. Least of

    prefill    tokens that wait there and this prompt's, minus the part of the prompt that is cached there
    decode     tokens of the blocks that requests there use, including this prompt's; shared blocks count once

and ties by chance. A request counts from its placement to its end, but only with its prompt, because Ray reports
no progress of decoding by default. All ingresses notify each other of placements: one policy serves the whole
fleet here, so these arrive immediately. Not modelled: Dynamo holds requests back while all replicas have more than
sixteen steps of prefill to do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from router.cost import Candidate, RouteQuery
from router.policies import Decision, Split


class KVAwarePolicy:
    """One policy for the whole fleet. Callers report each ended request to `finished`."""

    is_shared = True

    def __init__(self) -> None:
        self._blocks: dict[str, Counter[int]] = {}
        """How many requests use each block, by replica."""
        self._placed: dict[tuple[int, ...], list[str]] = {}
        """Replicas of the open requests, by prompt."""

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order by the sum, and count the request where it goes."""
        split = Split(replicas)
        serving = list(split.serving)
        self._update_members([one.replica for one in serving])

        def total(candidate: Candidate) -> float:
            used = self._blocks[candidate.replica]
            num_blocks = len(used) + sum(block not in used for block in query.chain)
            waiting = candidate.queued_prefill_tokens + query.num_tokens
            prefill = max(waiting - query.overlap.get(candidate.replica, 0), 0.0)
            return prefill + num_blocks * candidate.page_size

        rng.shuffle(serving)
        serving.sort(key=total)
        if serving:
            chosen = serving[0].replica
            self._blocks[chosen].update(query.chain)
            self._placed.setdefault(tuple(query.chain), []).append(chosen)
        return split.decision([one.replica for one in serving], "rule", "kv_aware", query)

    def _update_members(self, names: Sequence[str]) -> None:
        """Forget replicas that have gone, with their requests, which are placed again."""
        gone = self._blocks.keys() - set(names)
        self._blocks = {name: self._blocks.get(name, Counter()) for name in names}
        if gone:
            placed = {chain: [name for name in at if name not in gone] for chain, at in self._placed.items()}
            self._placed = {chain: at for chain, at in placed.items() if at}

    def finished(self, chain: Sequence[int], replica: str) -> None:
        """Note that a request with this prompt has ended at `replica`."""
        placed = self._placed.get(tuple(chain), [])
        if replica not in placed:
            return
        placed.remove(replica)
        if not placed:
            del self._placed[tuple(chain)]
        used = self._blocks[replica]
        used.subtract(chain)
        for block in chain:
            if used[block] <= 0:
                del used[block]
