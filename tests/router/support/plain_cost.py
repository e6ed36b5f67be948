"""The cost policy and the wait for an engine as plain computations over all replicas, to compare with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import xxhash

from router.cost import Candidate, RouteQuery, cost, queue_seconds
from router.policies import MIN_SHARE, Decision, LoadGuard, Reason
from router.rendezvous import session_key


def rendezvous(key: int, names: Sequence[str]) -> list[str]:
    """Sort all by their scores."""

    def score(name: str) -> int:
        mixed = xxhash.xxh3_64_intdigest(name.encode()) ^ key
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            mixed = (mixed ^ mixed >> 33) * factor % 2**64
        return mixed ^ mixed >> 33

    return sorted(names, key=score, reverse=True)


def plain_decision(
    query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random, num_random: int = 4, num_holders: int = 2
) -> Decision:
    """Decide as `CostPolicy` does, but look at every replica for every step."""
    available = [one for one in replicas if one.is_available]
    serving = {one.replica: one for one in available or replicas}
    last = [one for one in replicas if one.replica not in serving]
    if not serving:
        return Decision((), "none_available", "cost", {}, 0)
    held = {name: query.overlap.get(name, 0) for name in serving}
    most = max(held.values())
    key = session_key(query.session) if query.session is not None and not most else query.key
    preferred = rendezvous(key, list(serving))
    rank = {name: index for index, name in enumerate(preferred)}
    best = sorted(preferred, key=lambda name: -held[name])[:num_holders]
    drawn = rng.sample(list(serving), min(num_random, len(serving)))
    terms = {name: cost(query, serving[name]) for name in dict.fromkeys([preferred[0], *best, *drawn])}
    ordered = sorted(terms, key=lambda name: (terms[name].total, rank[name]))
    bound = terms[ordered[0]].total * 1.05 + 0.02
    guard = LoadGuard()
    mean = sum(one.num_running for one in serving.values()) / len(serving)
    worth = {name: held[name] if held[name] * MIN_SHARE >= query.num_tokens else 0 for name in terms}
    first = min(
        (name for name in ordered if terms[name].total <= bound),
        key=lambda name: (
            serving[name].num_running > guard.factor * mean + guard.slack,
            -worth[name],
            rank[name],
        ),
    )
    rest = [name for name in preferred if name not in terms]
    rest.sort(key=lambda name: (queue_seconds(serving[name]), rank[name]))
    last.sort(key=lambda one: (one.num_running, one.replica))
    order = [first, *(name for name in ordered if name != first), *rest, *(one.replica for one in last)]
    reason: Reason = "cold" if not most else "holder" if held[first] == most else "cheaper"
    reason = "none_available" if not available else "only_one" if len(serving) == 1 else reason
    return Decision(tuple(order), reason, "cost", terms, max(held.values()) - held[first])


def plain_queue_seconds(candidates: Mapping[str, Candidate], num_sending: int) -> float | None:
    """Return the least wait as admission reads it; None when no replica can serve."""
    up = [one for one in candidates.values() if one.is_available]
    if not up:
        return None
    return min(map(queue_seconds, up)) + num_sending / sum(one.prefill_rate for one in up)
