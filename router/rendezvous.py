"""Rendezvous hashing (Thaler and Ravishankar 1998): every replica scores every key, the best score wins.

All ingresses agree without talking, and a replica that comes or goes moves only its own keys.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

_KEY_BYTES = 8
_MASK = (1 << 8 * _KEY_BYTES) - 1


def rendezvous_order(key: int, replicas: Iterable[str]) -> list[str]:
    """Replicas by their score for `key`, of which the low 64 bits count, best first."""
    seed = (key & _MASK).to_bytes(_KEY_BYTES, "little")
    scored = [(xxhash.xxh3_64_intdigest(seed + replica.encode()), replica) for replica in replicas]
    scored.sort(reverse=True)
    return [replica for _, replica in scored]


def session_key(session: str) -> int:
    """What a session's place is found by. 64 bits."""
    return int(xxhash.xxh3_64_intdigest(session.encode()))
