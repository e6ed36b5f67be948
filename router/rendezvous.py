"""Rendezvous hashing (Thaler and Ravishankar 1998): every replica scores every key, the best score wins.

All ingresses agree without communication, and a replica that is added or removed moves only its own keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

_KEY_BYTES = 8
_MASK = (1 << 8 * _KEY_BYTES) - 1


class RendezvousOrder:
    """Replicas by their score for a key, best first. Whoever needs only the first does not sort the others."""

    __slots__ = ("_names", "_positions", "_scores", "_seed")

    def __init__(self, key: int, replicas: Iterable[str]) -> None:
        """Score the replicas for the low 64 bits of `key`. O(replicas), about 0.15 µs each."""
        seed = self._seed = (key & _MASK).to_bytes(_KEY_BYTES, "little")
        digest = xxhash.xxh3_64_intdigest
        self._names = list(replicas)
        self._scores = [digest(seed + replica.encode()) for replica in self._names]
        self._positions: list[int] | None = None

    @property
    def first(self) -> str:
        """The replica with the best score. Raises ValueError when there is none."""
        return self._names[self._scores.index(max(self._scores))]

    def score(self, replica: str) -> int:
        """Return a replica's score, 64 bits; replicas have the order of their scores, the highest first."""
        return int(xxhash.xxh3_64_intdigest(self._seed + replica.encode()))

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> str:
        return self._names[self._sorted()[index]]

    def __iter__(self) -> Iterator[str]:
        return map(self._names.__getitem__, self._sorted())

    def _sorted(self) -> list[int]:
        if self._positions is None:
            ascending = np.argsort(np.array(self._scores, dtype=np.uint64))
            self._positions = ascending[::-1].tolist()
        return self._positions


def rendezvous_order(key: int, replicas: Iterable[str]) -> list[str]:
    """Order replicas by their score for the low 64 bits of `key`, best first."""
    return list(RendezvousOrder(key, replicas))


def session_key(session: str) -> int:
    """Return the 64-bit key of a session's place."""
    return int(xxhash.xxh3_64_intdigest(session.encode()))
