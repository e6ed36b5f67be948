"""The most recently used runs of blocks, so that a new subscriber receives the hottest ones first.

A run is a node's own list of blocks, which grows with the node. Using a run uses all that it continues, so no run
was used after one that precedes it in its prefix; of those used together, the one that starts first precedes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MAX_RUNS = 8192
"""Runs that are remembered, about 250 bytes each; of more, the half that was used last."""


class _Use(NamedTuple):
    """The last use of a run."""

    number: int
    """Counts uses."""
    start: int
    """The run's position in its prefix."""
    run: list[int]


class RecentRuns:
    """Remembers runs by their first block, with their last use. Belongs to the engine loop; all may `copy`."""

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}
        self._num_uses = 0

    def use(self, runs: Iterable[tuple[int, list[int]]]) -> None:
        """Note a use of runs that continue each other, each with its position. O(runs), amortised."""
        self._num_uses += 1
        for start, run in runs:
            if run:
                self._uses[run[0]] = _Use(self._num_uses, start, run)
        if len(self._uses) > MAX_RUNS:
            self._forget_half()

    def split(self, upper: tuple[int, list[int]], lower: tuple[int, list[int]]) -> None:
        """Note that a run was split into two, which were used when it was."""
        whole = upper[1] or lower[1]
        used = self._uses.get(whole[0]) if whole else None
        if used is not None:
            for start, run in (upper, lower):
                if run:
                    self._uses[run[0]] = _Use(used.number, start, run)

    def join(self, first: int, joined: tuple[int, list[int]]) -> None:
        """Note that the run that began with block `first` is the end of another run now, `joined`."""
        start, run = joined
        lower = self._uses.pop(first, None)
        used = self._uses.get(run[0], lower)
        if used is not None:
            self._uses[run[0]] = _Use(used.number, start, run)

    def forget(self, run: list[int]) -> None:
        """Note that a run is no longer held."""
        if run:
            self._uses.pop(run[0], None)

    def copy(self) -> list[_Use]:
        """Return all uses, in no order; `newest_first` orders them. One step of the interpreter."""
        return list(self._uses.values())

    def _forget_half(self) -> None:
        """Forget the runs that were used longest ago. Those that they continue were used later, or with them."""
        middle = sorted(use.number for use in self._uses.values())[len(self._uses) // 2]
        self._uses = {first: use for first, use in self._uses.items() if use.number > middle}


def newest_first(uses: list[_Use]) -> list[list[int]]:
    """Return the runs of these uses, the last used first, and none before those that precede it."""
    return [use.run for use in sorted(uses, key=lambda use: (-use.number, use.start))]
