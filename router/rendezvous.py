"""Rendezvous hashing (Thaler and Ravishankar 1998): every replica scores every key, the best score wins.

All ingresses agree without communication, and a replica that is added or removed moves only its own keys.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

_KEY_BYTES = 8
_MASK = (1 << 8 * _KEY_BYTES) - 1


def rendezvous_order(key: int, replicas: Iterable[str]) -> list[str]:
    """Order replicas by their score for the low 64 bits of `key`, best first."""
    seed = (key & _MASK).to_bytes(_KEY_BYTES, "little")
    scored = [(xxhash.xxh3_64_intdigest(seed + replica.encode()), replica) for replica in replicas]
    scored.sort(reverse=True)
    return [replica for _, replica in scored]


def session_key(session: str) -> int:
    """Return the 64-bit key of a session's place."""
    return int(xxhash.xxh3_64_intdigest(session.encode()))
