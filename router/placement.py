"""Which replica a prompt goes to, knowing only its prefix key and how long the queues are.

    prefix key ──rendezvous hash──▶ favourite ──queue too long?──▶ least loaded ("spill")
                                        └──────── no ─────────────▶ favourite   ("prefix")

Rendezvous hashing (Thaler and Ravishankar 1998): every replica scores every key, the best score wins. All
ingresses agree without talking, and a replica that comes or goes moves only its own keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import xxhash

Reason = Literal["prefix", "spill", "load", "only_one", "error"]


@dataclass(frozen=True, slots=True)
class SpillRule:
    """When a favourite is too busy: load > factor x mean load + slack."""

    factor: float = 1.5
    """Times the mean load of all replicas."""
    slack: float = 8.0
    """Requests above that before it counts: small queues are not worth losing a cached prefix for."""

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ValueError(f"the spill factor must be at least 1, got {self.factor}")
        if self.slack < 0.0:
            raise ValueError(f"the spill slack must be at least 0 requests, got {self.slack}")

    def is_overloaded(self, load: float, mean: float) -> bool:
        """Whether a replica with this load should be spared."""
        return load > self.factor * mean + self.slack


@dataclass(frozen=True, slots=True)
class Placement:
    """Replicas in order of preference, and why the first is first."""

    order: tuple[str, ...]
    reason: Reason


def place(key: int | None, loads: Mapping[str, float], rule: SpillRule, holder: str | None = None) -> Placement:
    """Rank replicas for a prompt; `loads` holds requests queued or running by replica, `key` None ranks by load.

    `holder` is a replica that is known to hold the prompt's beginning: it is the favourite then.

    Deterministic across processes. Never puts a replica with a longer queue in front when it spills.
    """
    if len(loads) <= 1:
        return Placement(tuple(loads), "only_one")
    by_score = favourites(key or 0, list(loads))
    if holder is not None and holder in loads:
        by_score.remove(holder)
        by_score.insert(0, holder)
    position = {replica: index for index, replica in enumerate(by_score)}
    # Ties go to the better score, so that what spills from one prefix spills to one place.
    by_load = sorted(loads, key=lambda replica: (loads[replica], position[replica]))
    if key is None:
        return Placement(tuple(by_load), "load")
    favourite = by_score[0]
    mean = sum(loads.values()) / len(loads)
    if rule.is_overloaded(loads[favourite], mean):
        return Placement(tuple(by_load), "spill")
    second = by_score[1]
    rest = [replica for replica in by_load if replica not in (favourite, second)]
    return Placement((favourite, second, *rest), "prefix")


def favourites(key: int, replicas: Sequence[str]) -> list[str]:
    """Replicas by their rendezvous score for `key`, best first."""
    return sorted(replicas, key=lambda replica: (_score(key, replica), replica), reverse=True)


def _score(key: int, replica: str) -> int:
    return int(xxhash.xxh3_64_intdigest(replica.encode(), seed=key))
