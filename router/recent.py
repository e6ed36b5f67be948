"""Where this process sent prompts lately: a conversation's next turn follows its last one.

A prompt is remembered as the hash of each of its whole leading pages. The next turn of a short chat shares most of
its pages with the last turn, but not the fixed number of tokens that rendezvous hashing looks at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from cache.prefix_hash import block_hashes

MAX_PAGES = 64
"""Pages of a prompt that are looked at: more decide nothing."""


class RecentPrefixes:
    """Hashes of leading pages and the replica they went to, the least recently used forgotten first."""

    def __init__(self, page_size: int, capacity: int = 65_536) -> None:
        self._page_size = page_size
        self._capacity = capacity
        self._replicas: OrderedDict[int, str] = OrderedDict()

    def chain(self, token_ids: Sequence[int], root: int) -> list[int]:
        """The hash of each whole leading page and all before it, up to MAX_PAGES."""
        return block_hashes(token_ids[: MAX_PAGES * self._page_size], root, self._page_size)

    def find(self, chain: Sequence[int], replicas: Collection[str]) -> tuple[str | None, int]:
        """The replica of `replicas` that the longest known beginning of `chain` went to, and its tokens."""
        for index in range(len(chain) - 1, -1, -1):
            replica = self._replicas.get(chain[index])
            if replica in replicas:
                return replica, (index + 1) * self._page_size
        return None, 0

    def record(self, chain: Sequence[int], replica: str) -> None:
        """A prompt went to `replica`."""
        for page in chain:
            self._replicas[page] = replica
            self._replicas.move_to_end(page)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)
