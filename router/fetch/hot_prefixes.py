"""The prefixes that prompts share and the worth of each, for the warm-up of new replicas.

They form a tree over chained block hashes. An edge is a run of blocks; prompts branch at the first block that
differs:

    root ── [system prompt: 40 blocks, 9.1 uses] ─┬─ [document A: 300 blocks, 6.0 uses] ── question ...
                                                  └─ [document B: 120 blocks, 2.4 uses] ── question ...

A use counts 1, and half of that `half_life_s` later. A held prefix saves its tokens at each use, so a run is
worth uses times tokens, and holding it costs its tokens: per token of memory it is worth its uses. No run has more
uses than the one before it, so taking the most used runs first always takes whole prefixes.

A hash stands for all blocks before it, so two chains are compared by bisection: a prompt costs O(its new blocks).
Token ids are kept from a run's second use on: a prefix used once is not shared yet.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache import Namespace
from router.addresses import KVAddress

# The weight of a new use grows with time instead of decaying all others; all are scaled down before they overflow.
_MAX_DOUBLINGS = 64.0


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that several prompts share, and how often each length of it is used."""

    namespace: Namespace
    token_ids: array[int]
    uses: tuple[tuple[int, float], ...]
    """(tokens, uses per second of exactly that many known tokens), shortest first; the last is the whole prefix.

    The uses of a part that several prefixes share are listed in one of them only.
    """
    source: tuple[KVAddress, int] | None = None
    """Where its KV can be fetched, and how many of its tokens are there; None if no replica lends it."""
    elsewhere: int = 0
    """Leading tokens that are not lost with the replica that holds it, as another one holds them, too."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second that holding it saves."""
        return sum(length * rate for length, rate in self.uses)


class _BlockRun:
    """A run of blocks: an edge of the tree with the node that it leads to."""

    __slots__ = ("children", "count", "hashes", "namespace", "parent", "tokens", "weight")

    def __init__(self, parent: _BlockRun | None, namespace: Namespace, hashes: array[int]) -> None:
        self.parent = parent
        self.namespace = namespace
        self.hashes = hashes
        self.tokens: array[int] | None = None
        """Token ids, known from the second use on."""
        self.weight = 0.0
        """Decayed uses, in units that grow with time."""
        self.count = 0
        """Number of uses."""
        self.children: dict[int, _BlockRun] = {}
        """Runs that continue this one, by their first hash."""


class HotPrefixes:
    """The tree of shared prefixes, bounded in tokens and runs; the least used are dropped first.

    Not thread-safe. `now` is in seconds, never falling.
    """

    def __init__(
        self,
        block_tokens: int,
        max_tokens: int = 4_000_000,
        max_runs: int = 4096,
        half_life_s: float = 600.0,
    ) -> None:
        """A token costs 8 / `block_tokens` bytes and 4 more where it is shared, a run about 500 bytes."""
        for name, value in (("block_tokens", block_tokens), ("max_runs", max_runs), ("half_life_s", half_life_s)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if max_tokens < block_tokens:
            raise ValueError(f"max_tokens must be at least a block of {block_tokens} tokens, got {max_tokens}")
        self.block_tokens = block_tokens
        self.num_runs = 0
        self._max_blocks, self._max_runs = max_tokens // block_tokens, max_runs
        self._half_life = half_life_s
        self._root = _BlockRun(None, Namespace(""), array("Q"))
        self._num_blocks = 0
        self._epoch: float | None = None  # the time at which a use weighs 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all runs."""
        return self._num_blocks * self.block_tokens

    # --- what comes in -------------------------------------------------------------------------------------

    def record(self, namespace: Namespace, token_ids: Sequence[int], chain: Sequence[int], now: float) -> None:
        """Record the use of a prompt; `chain` is its `block_hashes` under its namespace."""
        self._use(namespace, token_ids, chain, self._unit(now), 1)

    def merge(self, prefix: HotPrefix, chain: Sequence[int], now: float, weight: float = 1.0) -> None:
        """Add a prefix that another process recorded, as if recorded here; `weight` scales its uses."""
        per_use = weight * self._half_life / math.log(2) * self._unit(now)
        for length, rate in prefix.uses:
            beginning = chain[: length // self.block_tokens]
            self._use(prefix.namespace, prefix.token_ids, beginning, rate * per_use, 2)

    def _use(
        self, namespace: Namespace, token_ids: Sequence[int], chain: Sequence[int], weight: float, count: int
    ) -> None:
        chain = chain[: self._max_blocks]
        run, done = self._root, 0
        while done < len(chain):
            child = run.children.get(chain[done])
            if child is None:
                child = self._add(run, namespace, array("Q", chain[done:]))
            else:
                child = self._split(child, _common(child.hashes, chain, done))
            child.weight += weight
            child.count += count
            end = done + len(child.hashes)
            if child.tokens is None and child.count > 1:
                child.tokens = array("i", token_ids[done * self.block_tokens : end * self.block_tokens])
            run, done = child, end
        if self._num_blocks > self._max_blocks or self.num_runs > self._max_runs:
            self._prune()

    def _add(self, parent: _BlockRun, namespace: Namespace, hashes: array[int]) -> _BlockRun:
        run = parent.children[hashes[0]] = _BlockRun(parent, namespace, hashes)
        self._num_blocks += len(hashes)
        self.num_runs += 1
        return run

    def _split(self, run: _BlockRun, length: int) -> _BlockRun:
        """Split off the first `length` blocks of a run and return them as a new run."""
        if length == len(run.hashes):
            return run
        assert run.parent is not None
        upper = _BlockRun(run.parent, run.namespace, run.hashes[:length])
        upper.weight, upper.count = run.weight, run.count
        run.parent.children[upper.hashes[0]] = upper
        run.parent, run.hashes = upper, run.hashes[length:]
        upper.children[run.hashes[0]] = run
        if run.tokens is not None:
            border = length * self.block_tokens
            upper.tokens, run.tokens = run.tokens[:border], run.tokens[border:]
        self.num_runs += 1
        return upper

    def _prune(self) -> None:
        """Drop the least used leaves, an eighth more than necessary so that this is rare."""
        leaves = [(run.weight, id(run), run) for run in self._runs() if not run.children]
        heapq.heapify(leaves)
        while self._num_blocks > self._max_blocks * 7 // 8 or self.num_runs > self._max_runs * 7 // 8:
            _, _, run = heapq.heappop(leaves)
            parent = run.parent
            assert parent is not None
            del parent.children[run.hashes[0]]
            self._num_blocks -= len(run.hashes)
            self.num_runs -= 1
            if not parent.children and parent is not self._root:
                heapq.heappush(leaves, (parent.weight, id(parent), parent))

    def _runs(self) -> Iterator[_BlockRun]:
        """Yield all runs, parents first."""
        stack = list(self._root.children.values())
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())

    def _unit(self, now: float) -> float:
        """Return the weight of a use at `now`."""
        if self._epoch is None:
            self._epoch = now
        doublings = (now - self._epoch) / self._half_life
        if doublings > _MAX_DOUBLINGS:
            for run in self._runs():
                run.weight *= 2.0**-doublings
            self._epoch, doublings = now, 0.0
        return float(2.0**doublings)

    # --- what is worth most --------------------------------------------------------------------------------

    def top(self, max_tokens: int, now: float) -> list[HotPrefix]:
        """Return the most valuable prefixes, at most `max_tokens` tokens together, the best first.

        A part that several of them share counts once. The last one may be cut at a block. O(runs · log runs).
        """
        taken = self._most_used(max_tokens // self.block_tokens)
        used_further = dict.fromkeys(taken, 0.0)
        for run in taken:
            if run.parent in used_further:
                used_further[run.parent] += run.weight
        per_second = math.log(2) / self._half_life / self._unit(now)
        is_told: set[_BlockRun] = set()
        prefixes = []
        for run in taken:
            if any(child in used_further for child in run.children.values()):
                continue
            prefixes.append(self._prefix(run, taken, used_further, per_second, is_told))
        return sorted(prefixes, key=lambda prefix: -prefix.tokens_per_s)

    def _most_used(self, max_blocks: int) -> dict[_BlockRun, int]:
        """Choose runs and the number of their blocks to take; each comes after the run that it continues."""
        frontier = [(-run.weight, id(run), run) for run in self._root.children.values()]
        heapq.heapify(frontier)
        taken: dict[_BlockRun, int] = {}
        while frontier and max_blocks > 0:
            _, _, run = heapq.heappop(frontier)
            if run.tokens is None:
                continue
            taken[run] = length = min(len(run.hashes), max_blocks)
            max_blocks -= length
            if length == len(run.hashes):
                for child in run.children.values():
                    heapq.heappush(frontier, (-child.weight, id(child), child))
        return taken

    def _prefix(
        self,
        last: _BlockRun,
        taken: dict[_BlockRun, int],
        used_further: dict[_BlockRun, float],
        per_second: float,
        is_told: set[_BlockRun],
    ) -> HotPrefix:
        path = []
        run = last
        while run.parent is not None:
            path.append(run)
            run = run.parent
        token_ids = array("i")
        uses = []
        for run in reversed(path):
            assert run.tokens is not None
            token_ids += run.tokens[: taken[run] * self.block_tokens]
            if run is last or run not in is_told:
                # Rounding may make the sum of the parts slightly larger than the whole.
                uses.append((len(token_ids), max(0.0, run.weight - used_further[run]) * per_second))
                is_told.add(run)
        return HotPrefix(last.namespace, token_ids, tuple(uses))


def _common(hashes: Sequence[int], chain: Sequence[int], start: int) -> int:
    """Count how many of `hashes` match the chain from `start` on, at least one: chains equal at one block are
    equal before it.
    """
    low, high = 1, min(len(hashes), len(chain) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] == chain[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
