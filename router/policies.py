"""Routing policies: the protocol, and Raydix's own by the name that YAML and the simulator use.

A policy orders *all* replicas: the first is chosen, the second is the runner-up, and so on down to those that are
unavailable, which always come last. Raydix's own keep no state; randomness comes from `rng`. A custom policy
is a class of this shape, named as "package.module:Class" (`router/policy_names.py`):

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
from itertools import islice
from types import MappingProxyType
from typing import Literal, Protocol

from router.candidates import Candidates, Order
from router.cost import DEFAULT_COST, Candidate, CostSettings, RouteQuery, Terms, cost, queue_seconds
from router.fetch.fetching import fetch_or_compute
from router.overlap import Overlap
from router.rendezvous import RendezvousOrder, session_key

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
rule            the rule of a custom policy, or of a simulated rival
only_one        there is no choice
none_available  no replica can serve now; they are tried in the policy's order nevertheless
"""


@dataclass(frozen=True, slots=True)
class Decision:
    """The order of replicas for a prompt, and everything needed to explain it."""

    order: Sequence[str]
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
    not block (no I/O, no locks held for long), and should take about 0.1 ms. `raydix_router_decision_seconds`
    shows it. When it raises, the request goes to the replica with the fewest requests, and
    `raydix_router_errors_total` counts it.
    """

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order `replicas` for the prompt `query`; `Split.decision` makes the result.

        `replicas` includes the unavailable ones. The result depends only on the arguments, the
        state of `rng` and what the policy remembers of earlier calls, so that a simulation can be repeated.
        """


_FEW = 8
"""Up to this many holders are sorted by their score; more are looked for in rendezvous order."""
MIN_SHARE = 3
"""A cached prefix shorter than 1 / MIN_SHARE of its prompt does not outweigh a preferred place."""
LOWER_WORTH = 0.5
"""The value of a token that must be loaded, relative to one on the device, among replicas of equal cost."""


@dataclass(frozen=True, slots=True)
class LoadGuard:
    """Decides when a replica is too busy to be preferred: requests there > factor x mean + slack."""

    factor: float = 1.5
    """Multiple of the mean number of requests at the replicas that can serve."""
    slack: float = 8.0
    """Requests allowed beyond that: a cached prefix is worth a short queue."""

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ValueError(f"the guard's factor must be at least 1, got {self.factor}")
        if self.slack < 0.0:
            raise ValueError(f"the guard's slack must be at least 0 requests, got {self.slack}")

    def bound(self, num_running: int, num_serving: int) -> float:
        """Return the requests beyond which a replica is too busy; `num_serving` run `num_running` together."""
        return self.factor * (num_running / num_serving) + self.slack

    def spared(self, serving: Sequence[Candidate]) -> set[str]:
        """Return the replicas that are not preferred, because they are too busy; never all of them."""
        bound = self.bound(sum(candidate.num_running for candidate in serving), len(serving))
        return {candidate.replica for candidate in serving if candidate.num_running > bound}


class CostPolicy:
    """Chooses the cheapest of a few replicas: the best holders, the prefix's rendezvous place and some at random.

    It compares a few and not all because load reports are old: ingresses that compare all replicas find the same
    cheapest one and herd there. For the same reason it treats costs as equal if they differ by less than the error
    of the reports. Among equals it avoids a replica that runs far more requests than the others, then prefers the
    one that holds most of the prompt, if that is a good part of it, then the one that rendezvous hashing prefers,
    so that a cold prefix is computed on the same replica from whichever ingress it comes.
    """

    def __init__(
        self,
        num_random: int = 4,
        num_holders: int = 2,
        tolerance: float = 0.02,
        relative_tolerance: float = 0.05,
        settings: CostSettings = DEFAULT_COST,
        guard: LoadGuard | None = None,
        price: Callable[[RouteQuery, Candidate, CostSettings], Terms] = cost,
    ) -> None:
        """`tolerance` is in seconds, about the age of load reports; `relative_tolerance` is the error of rates.

        `price` is `cost`, or `router.fetch.fetching.fetch_or_compute` where replicas fetch KV from each other.
        """
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
        self._price = price

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order by cost; replicas that were not compared follow in the order of their queues."""
        known = Candidates.of(replicas)
        split, serving = Split(known), known.serving
        if not serving:
            return split.decision([], "only_one", "cost", query)
        if len(serving) == 1:  # There is no choice.
            terms = {name: self._price(query, one, self._settings) for name, one in serving.items()}
            return split.decision(list(terms), "only_one", "cost", query, terms)
        held = Overlap.of(query.overlap)
        most = held.most_among(serving)
        preferred = known.rendezvous(_place_key(query, most))
        compared = self._compared(held, known, preferred, rng)
        terms = {name: self._price(query, serving[name], self._settings) for name in compared}
        score = {name: preferred.score(name) for name in terms}
        ordered = sorted(terms, key=lambda name: (terms[name].total, -score[name]))
        bound = terms[ordered[0]].total * (1.0 + self._relative_tolerance) + self._tolerance
        close = [name for name in ordered if terms[name].total <= bound]
        busy = self._guard.bound(known.num_running, len(serving))
        # A prefix that all prompts share, such as a chat template's, must not bring them all to one replica.
        worth = {name: _worth(terms[name]) for name in close}
        worth = {name: tokens if tokens * MIN_SHARE >= query.num_tokens else 0 for name, tokens in worth.items()}
        first = min(close, key=lambda name: (serving[name].num_running > busy, -worth[name], -score[name]))
        ordered.remove(first)

        def rest() -> list[str]:
            waits = {name: queue_seconds(serving[name]) for name in preferred if name not in terms}
            return sorted(waits, key=waits.__getitem__)  # A stable sort: equal waits stay in rendezvous order.

        reason: Reason = "cold" if not most else "holder" if held.get(first, 0) == most else "cheaper"
        order = Order([first, *ordered], len(serving) - len(terms), rest)
        return split.decision(order, reason, "cost", query, terms)

    def _compared(
        self, held: Overlap, known: Candidates, preferred: RendezvousOrder, rng: random.Random
    ) -> Iterable[str]:
        """Return the rendezvous place, the best holders and random replicas, each once."""
        drawn = rng.sample(known.hashed.names, min(self._num_random, len(preferred)))
        best = self._best_holders(held, known.serving, preferred)
        return dict.fromkeys([preferred.first, *best, *drawn])

    def _best_holders(
        self, held: Overlap, serving: Mapping[str, Candidate], preferred: RendezvousOrder
    ) -> list[str]:
        """Return the deepest holders, or else any. Ties follow rendezvous order: by load, all would choose one."""
        best: list[str] = []
        for _, mask in held.levels:
            if mask.bit_count() <= _FEW:
                few = [name for name in held.names(mask) if name in serving]
                same: Iterable[str] = sorted(few, key=preferred.score, reverse=True)
                if held.has_lower:  # Prefer replicas that hold it on the device.
                    same = sorted(same, key=lambda name: sum(held.below(name)))
            else:
                same = (name for name in preferred if held.is_in(mask, name))
            best.extend(islice(same, self._num_holders - len(best)))
            if len(best) == self._num_holders:
                return best
        others = (name for name in preferred if name not in held)
        return [*best, *islice(others, self._num_holders - len(best))]


def _worth(terms: Terms) -> float:
    """Return a replica's cached tokens; those that must be loaded count less."""
    return terms.overlap - (1.0 - LOWER_WORTH) * sum(terms.below) if terms.below else terms.overlap


def _place_key(query: RouteQuery, most: int) -> int:
    """Return the key of the rendezvous place: the session's while no replica holds any of the prompt, else the
    prefix's.
    """
    return session_key(query.session) if query.session is not None and not most else query.key


@dataclass(frozen=True, slots=True)
class PlacePolicy:
    """Gives each session or prefix a fixed place, and the next one in rendezvous order while that is too busy.

    With the guard this is consistent hashing with bounded loads (Mirrokni et al. 2016), by rendezvous.
    """

    name: Literal["session", "rendezvous"]
    guard: LoadGuard = field(default_factory=LoadGuard)

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order by rendezvous hashing. Without a session id, `session` places by the prefix."""
        known = Candidates.of(replicas)
        split = Split(known)
        if not split.serving:
            return split.decision([], "only_one", self.name, query)
        by_session = self.name == "session" and query.session is not None
        key = session_key(query.session) if by_session and query.session is not None else query.key
        preferred = list(known.rendezvous(key))
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
    """Separates the replicas that can serve from those to try last. When none can serve, all count as able to."""

    def __init__(self, replicas: Sequence[Candidate]) -> None:
        self._known = Candidates.of(replicas)
        self.none_available = self._known.none_available
        self.serving: Sequence[Candidate] = (
            self._known if not self._known.unavailable else list(self._known.serving.values())
        )
        """Those to choose among; empty only when there are no replicas."""

    def decision(
        self,
        serving_order: Iterable[str],
        reason: Reason,
        policy: str,
        query: RouteQuery,
        terms: Mapping[str, Terms] | None = None,
    ) -> Decision:
        """Make the decision: put unavailable replicas last, and count the regret.

        `serving_order` contains each of `serving` once.
        """
        serving = self._known.serving
        last = sorted(self._known.unavailable, key=lambda one: (one.num_running, one.replica))
        names = [candidate.replica for candidate in last]
        order = serving_order.followed_by(names) if isinstance(serving_order, Order) else (*serving_order, *names)
        if self.none_available:
            reason = "none_available"
        elif len(serving) == 1:
            reason = "only_one"
        regret = 0
        if order:
            regret = Overlap.of(query.overlap).most_among(serving) - query.overlap.get(order[0], 0)
        return Decision(order, reason, policy, dict(terms or {}), regret)


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "cost": lambda: CostPolicy(price=fetch_or_compute),
        "session": lambda: PlacePolicy("session"),
        "least_loaded": LeastLoadedPolicy,
        "rendezvous": lambda: PlacePolicy("rendezvous"),
        "random": RandomPolicy,
    }
)
"""Raydix's policies to serve with, by their name as `router.policy` in YAML."""
