"""Routing policies: the protocol, and those of Raydix by the name that YAML and the simulator know them by.

A policy orders *all* replicas: the first is chosen, the second is the runner-up, and so on down to those that are
unavailable, which come last whatever else holds. Those of Raydix keep no state; chance comes in as `rng`. A policy
of your own is a class of this shape, named as "package.module:Class" (`router/policy_names.py`):

    class Spread:
        def decide(self, query, replicas, rng):
            split = Split(replicas)
            fewest_first = sorted(split.serving, key=lambda candidate: candidate.num_running)
            return split.decision([candidate.replica for candidate in fewest_first], "rule", "spread", query)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

from router.cost import DEFAULT_COST, Candidate, CostSettings, RouteQuery, Terms, cost, queue_seconds
from router.rendezvous import rendezvous_order, session_key

Reason = Literal[
    "holder",
    "cheaper",
    "cold",
    "session",
    "hash",
    "spill",
    "load",
    "random",
    "rule",
    "only_one",
    "none_available",
]
"""Why a policy chose the first replica of its order:

holder          it holds as much of the prompt as any that can serve
cheaper         another holds more, and would still cost more
cold            no replica holds any of the prompt
session, hash   the session or the prompt's first blocks belong there; spill: that place was too busy
load, random    the policy considers nothing else
rule            the rule of a policy of one's own, or of a simulated rival
only_one        there is no choice
none_available  no replica can serve now; they are tried in the policy's order nevertheless
"""


@dataclass(frozen=True, slots=True)
class Decision:
    """The order of replicas for a prompt, and everything needed to explain it."""

    order: tuple[str, ...]
    """Every replica once, best first; order[1] is the runner-up."""
    reason: Reason
    policy: str
    terms: Mapping[str, Terms]
    """Cost terms of the replicas that were compared; empty for policies without costs."""
    regret_tokens: int
    """Prompt tokens that the best available holder has cached and the chosen replica has not."""


class Policy(Protocol):
    """Orders the replicas for one prompt.

    Each ingress process makes one policy for each model, and the simulator one for each ingress. It is called in
    the thread of Serve's router, for one prompt at a time, and all prompts of that ingress wait meanwhile: it must
    not block (no I/O, no locks held for long), and 0.1 ms is a good time to take. `raydix_router_decision_seconds`
    shows it. When it raises, the request goes to the replica with the fewest requests, and
    `raydix_router_errors_total` counts it.
    """

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order `replicas` for the prompt `query`; `Split.decision` makes the result.

        `replicas` are all there are, the unavailable ones included. The result depends only on the arguments, the
        state of `rng` and what the policy remembers of earlier calls, so that a simulation can be repeated.
        """
        ...


MIN_SHARE = 3
"""A cached prefix shorter than 1 / MIN_SHARE of its prompt does not outweigh a preferred place."""


@dataclass(frozen=True, slots=True)
class LoadGuard:
    """Tells when a replica is too busy to be preferred: requests there > factor x mean + slack."""

    factor: float = 1.5
    """Multiple of the mean number of requests at the replicas that can serve."""
    slack: float = 8.0
    """Requests allowed beyond that: a cached prefix is worth a short queue."""

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ValueError(f"the guard's factor must be at least 1, got {self.factor}")
        if self.slack < 0.0:
            raise ValueError(f"the guard's slack must be at least 0 requests, got {self.slack}")

    def spared(self, serving: Sequence[Candidate]) -> set[str]:
        """Return the replicas that are too busy; never all of them."""
        mean = sum(candidate.num_running for candidate in serving) / len(serving)
        return {
            candidate.replica for candidate in serving if candidate.num_running > self.factor * mean + self.slack
        }


class CostPolicy:
    """Chooses the cheapest of a few replicas: the best holders, the prefix's rendezvous place and some at random.

    It compares a few and not all because load reports are old: ingresses that compare all replicas find the same
    cheapest one and herd there. For the same reason it treats costs as equal that differ by less than the error of
    what is known. Among equals it spares a replica that runs far more requests than the others, then prefers the
    one that holds most of the prompt, if that is a good part of it, then the one that rendezvous hashing prefers,
    so that a cold prefix is computed on the same replica whichever ingress it enters by.
    """

    def __init__(
        self,
        num_random: int = 4,
        num_holders: int = 2,
        tolerance: float = 0.02,
        relative_tolerance: float = 0.05,
        settings: CostSettings = DEFAULT_COST,
        guard: LoadGuard | None = None,
    ) -> None:
        """`tolerance` is in seconds, about the age of load reports; `relative_tolerance` is the error of rates."""
        if num_random < 1 or num_holders < 1:
            raise ValueError(f"at least 1 random replica and 1 holder, got {num_random} and {num_holders}")
        if tolerance < 0.0 or relative_tolerance < 0.0:
            raise ValueError(f"tolerances must be at least 0, got {tolerance} s and {relative_tolerance}")
        self._num_random = num_random
        self._num_holders = num_holders
        self._tolerance = tolerance
        self._relative_tolerance = relative_tolerance
        self._settings = settings
        self._guard = guard or LoadGuard()

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order by cost; replicas that were not compared follow in the order of their queues."""
        split = Split(replicas)
        serving = split.serving
        if not serving:
            return split.decision([], "only_one", "cost", query)
        by_name = {candidate.replica: candidate for candidate in serving}
        held = {name: query.overlap.get(name, 0) for name in by_name}
        most = max(held.values())
        preferred = rendezvous_order(_place_key(query, most), by_name)
        rank = {name: index for index, name in enumerate(preferred)}
        candidates = self._candidates(held, preferred, rng)
        terms = {name: cost(query, by_name[name], self._settings) for name in candidates}
        ordered = sorted(candidates, key=lambda name: (terms[name].total, rank[name]))
        bound = terms[ordered[0]].total * (1.0 + self._relative_tolerance) + self._tolerance
        close = [name for name in ordered if terms[name].total <= bound]
        busy = self._guard.spared(serving)
        # A prefix that all prompts share, such as a chat template's, must not bring them all to one replica.
        worth = {name: held[name] if held[name] * MIN_SHARE >= query.num_tokens else 0 for name in close}
        first = min(close, key=lambda name: (name in busy, -worth[name], rank[name]))
        ordered.remove(first)
        rest = [candidate for candidate in serving if candidate.replica not in terms]
        rest.sort(key=lambda candidate: (queue_seconds(candidate), rank[candidate.replica]))
        reason: Reason = "cold" if not most else "holder" if held[first] == most else "cheaper"
        return split.decision([first, *ordered, *(s.replica for s in rest)], reason, "cost", query, terms)

    def _candidates(self, held: Mapping[str, int], preferred: Sequence[str], rng: random.Random) -> list[str]:
        """Return the best holders and random replicas. Ties go by rendezvous order: by load, all would herd."""
        most = sorted(preferred, key=lambda name: -held[name])[: self._num_holders]
        drawn = rng.sample(preferred, min(self._num_random, len(preferred)))
        return list(dict.fromkeys([preferred[0], *most, *drawn]))


def _place_key(query: RouteQuery, most: int) -> int:
    """Return the key of the rendezvous place: the session's while no replica holds any of the prompt, else the
    prefix's.
    """
    return session_key(query.session) if query.session is not None and not most else query.key


@dataclass(frozen=True, slots=True)
class PlacePolicy:
    """Gives each session or prefix a fixed place, and the next in rendezvous order while that is too busy.

    With the guard this is consistent hashing with bounded loads (Mirrokni et al. 2016), by rendezvous.
    """

    name: Literal["session", "rendezvous"]
    guard: LoadGuard = field(default_factory=LoadGuard)

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order by rendezvous hashing. Without a session id, `session` places by the prefix."""
        split = Split(replicas)
        if not split.serving:
            return split.decision([], "only_one", self.name, query)
        by_session = self.name == "session" and query.session is not None
        key = session_key(query.session) if by_session and query.session is not None else query.key
        preferred = rendezvous_order(key, (candidate.replica for candidate in split.serving))
        spared = self.guard.spared(split.serving)
        order = sorted(preferred, key=spared.__contains__)
        reason: Reason = "spill" if order[0] != preferred[0] else "session" if by_session else "hash"
        return split.decision(order, reason, self.name, query)


class LeastLoadedPolicy:
    """Chooses the shortest queue of prefill work in seconds, then the fewest requests; ties by chance."""

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order by load; caches are ignored."""
        split = Split(replicas)
        serving = list(split.serving)
        rng.shuffle(serving)
        serving.sort(key=lambda candidate: (queue_seconds(candidate), candidate.num_running))
        return split.decision([candidate.replica for candidate in serving], "load", "least_loaded", query)


class RandomPolicy:
    """Chooses any replica."""

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order by chance; load and caches are ignored."""
        split = Split(replicas)
        order = [candidate.replica for candidate in split.serving]
        rng.shuffle(order)
        return split.decision(order, "random", "random", query)


class Split:
    """Separates the replicas that can serve from those to try last. When none can, all count as able to."""

    def __init__(self, replicas: Sequence[Candidate]) -> None:
        serving = [candidate for candidate in replicas if candidate.is_available]
        self.none_available = not serving
        self.serving: Sequence[Candidate] = serving or list(replicas)
        """Those to choose among; empty only when there are no replicas."""
        self._last = [candidate for candidate in replicas if not candidate.is_available] if serving else []
        self._last.sort(key=lambda candidate: (candidate.num_running, candidate.replica))

    def decision(
        self,
        serving_order: Iterable[str],
        reason: Reason,
        policy: str,
        query: RouteQuery,
        terms: Mapping[str, Terms] | None = None,
    ) -> Decision:
        """Make the decision: unavailable replicas go last, and the regret is counted.

        `serving_order` contains each of `serving` once.
        """
        order = (*serving_order, *(candidate.replica for candidate in self._last))
        if self.none_available:
            reason = "none_available"
        elif len(self.serving) == 1:
            reason = "only_one"
        regret = 0
        if order:
            best = max(query.overlap.get(candidate.replica, 0) for candidate in self.serving)
            regret = best - query.overlap.get(order[0], 0)
        return Decision(order, reason, policy, dict(terms or {}), regret)


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "cost": CostPolicy,
        "session": lambda: PlacePolicy("session"),
        "least_loaded": LeastLoadedPolicy,
        "rendezvous": lambda: PlacePolicy("rendezvous"),
        "random": RandomPolicy,
    }
)
"""Raydix's policies to serve with, by their name as `router.policy` in YAML."""
