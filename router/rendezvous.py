"""Rendezvous hashing (Thaler and Ravishankar 1998): every replica scores every key, the best score wins.

All ingresses agree without communication, and a replica that is added or removed moves only its own keys. Names
are hashed once, when the fleet changes; a key is mixed into all of their hashes together:

    score = mix(xxh3_64(name) ^ key),  mix: the finalizer of MurmurHash3, in which every bit depends on every bit
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import xxhash

_MASK = (1 << 64) - 1
_SHIFT, _FIRST, _SECOND = np.uint64(33), np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


class HashedNames:
    """The names of replicas with their hashes. Never changes."""

    __slots__ = ("_positions", "hashes", "names")

    def __init__(self, names: Iterable[str]) -> None:
        """Hash the names. O(names)."""
        self.names = tuple(names)
        digest = xxhash.xxh3_64_intdigest
        self.hashes: npt.NDArray[np.uint64] = np.array([digest(name.encode()) for name in self.names], np.uint64)
        self._positions: dict[str, int] | None = None

    def position(self, name: str) -> int:
        """Return the position of a name in `names`. Raises KeyError for another name."""
        if self._positions is None:
            self._positions = {name: position for position, name in enumerate(self.names)}
        return self._positions[name]


class RendezvousOrder:
    """Replicas by their score for a key, best first. A caller that needs only the first sorts no others."""

    __slots__ = ("_hashed", "_positions", "_scores")

    def __init__(self, key: int, replicas: HashedNames) -> None:
        """Score the replicas for the low 64 bits of `key`. O(replicas), 10 µs for a thousand of them."""
        scores = replicas.hashes ^ np.uint64(key & _MASK)
        scores ^= scores >> _SHIFT
        scores *= _FIRST
        scores ^= scores >> _SHIFT
        scores *= _SECOND
        scores ^= scores >> _SHIFT
        self._hashed, self._scores = replicas, scores
        self._positions: list[int] | None = None

    @property
    def first(self) -> str:
        """The replica with the best score. Raises ValueError when there is none."""
        return self._hashed.names[int(self._scores.argmax())]

    def score(self, replica: str) -> int:
        """Return a replica's score, 64 bits; a higher score comes first."""
        return int(self._scores[self._hashed.position(replica)])

    def __len__(self) -> int:
        return len(self._hashed.names)

    def __iter__(self) -> Iterator[str]:
        if self._positions is None:
            self._positions = self._scores.argsort()[::-1].tolist()
        return map(self._hashed.names.__getitem__, self._positions)


def session_key(session: str) -> int:
    """Return the 64-bit key of a session's rendezvous place."""
    return int(xxhash.xxh3_64_intdigest(session.encode()))
