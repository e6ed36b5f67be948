"""The rules of other routers, for comparison, with the same knowledge as Raydix's own policies.

Each is the published rule with its published defaults. It has the best knowledge that its system could have: exact
cached prefix lengths from the replicas (some systems only estimate them from their own routing), the most recent
loads, and its own dispatches counted immediately. The comparison measures the rule, and not its system's
knowledge of the cache, which would be worse.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from deployments.simulator.fleet.affinity import AffinityPolicy
from deployments.simulator.fleet.kv_aware import KVAwarePolicy
from router.cost import Candidate, RouteQuery, uncached_tokens
from router.policies import POLICIES, CostPolicy, Decision, Policy, Split


class RoundRobinPolicy:
    """Chooses the replicas in turn."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order from the next replica on; each ingress has its own counter."""
        split = Split(replicas)
        names = [candidate.replica for candidate in split.serving]
        first = next(self._turn) % len(names) if names else 0
        return split.decision(names[first:] + names[:first], "rule", "round_robin", query)


class PowerOfTwoPolicy:
    """Ray Serve's default: the one with fewer requests of two replicas drawn by chance (Mitzenmacher 2001)."""

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order by two draws; the others follow by chance."""
        split = Split(replicas)
        drawn = list(split.serving)
        rng.shuffle(drawn)
        drawn[:2] = sorted(drawn[:2], key=lambda candidate: candidate.num_running)
        return split.decision([candidate.replica for candidate in drawn], "rule", "pow2", query)


class ThresholdPolicy:
    """SGLang's cache-aware rule: longest match if it covers enough of the prompt, else the least loaded.

    With unbalanced loads it takes the shortest queue and ignores the cache. Load is requests in flight.
    Improved here: true prefix lengths instead of its own routing history; ties of the longest match go to the less
    loaded replica.
    """

    def __init__(
        self, cache_threshold: float = 0.3, balance_abs_threshold: int = 64, balance_rel_threshold: float = 1.5
    ) -> None:
        self._cache_threshold = cache_threshold
        self._balance_abs_threshold = balance_abs_threshold
        self._balance_rel_threshold = balance_rel_threshold

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order by the cached prefix, or by load."""
        loads = [candidate.num_running for candidate in replicas if candidate.is_available] or [0]
        is_imbalanced = max(loads) - min(loads) > self._balance_abs_threshold and max(
            loads
        ) > self._balance_rel_threshold * min(loads)
        matched = max(query.overlap.values(), default=0) / query.num_tokens
        if is_imbalanced or matched <= self._cache_threshold:
            return _ranked(query, replicas, rng, "threshold", lambda candidate: (candidate.num_running,))
        return _ranked(
            query, replicas, rng, "threshold",
            lambda candidate: (-query.overlap.get(candidate.replica, 0), candidate.num_running),
        )  # fmt: skip


class LinearPolicy:
    """Dynamo's KV router: least of prefill blocks + decode blocks, with its default weight of 1 and temperature 0.

    Prefill is the work that waits there and this prompt's uncached part, decode the KV that running requests hold.
    The unit cancels: tokens here. Improved here: true prefix lengths and loads as from its event plane, none of it
    delayed more than Raydix's.
    """

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order by the least sum."""

        def total(candidate: Candidate) -> tuple[float]:
            prefill = candidate.queued_prefill_tokens + _uncached(query, candidate)
            return (prefill + (candidate.pages_total - candidate.pages_free) * candidate.page_size,)

        return _ranked(query, replicas, rng, "linear", total)


class ProductPolicy:
    """LMetric (arXiv 2603.15202): least of new prefill tokens x batch size, the request counted in; no knobs.

    The paper's new tokens are the prompt's own uncached ones. `with_queue` follows an `lmetric` for Dynamo: work
    that waits there is new as well, so the queue counts, which makes it a much better rule.
    """

    def __init__(self, with_queue: bool = False) -> None:
        self._with_queue = with_queue

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order by the least product."""

        def product(candidate: Candidate) -> tuple[float]:
            queued = candidate.queued_prefill_tokens if self._with_queue else 0.0
            return ((queued + _uncached(query, candidate)) * (candidate.num_running + 1),)

        return _ranked(query, replicas, rng, "product_queue" if self._with_queue else "product", product)


class StickyPolicy:
    """llm-d's token-aware routing, its default: stay with the cache until its holders are saturated.

    Holders of at least `affinity` of the prompt are kept, unless the least of their waiting prefill, in seconds,
    exceeds that of the others by more than `max_penalty_s`; then all replicas are kept. It chooses the one with
    the least waiting prefill tokens and uncached tokens of this prompt; from `most_tokens` on all count alike. By
    default it never explores. Improved here: true prefix lengths, and each replica's true prefill rate, which
    llm-d's users measure.
    """

    def __init__(self, affinity: float = 0.8, max_penalty_s: float = 18.0, most_tokens: int = 4_194_304) -> None:
        self._affinity = affinity
        self._max_penalty_s = max_penalty_s
        self._most_tokens = most_tokens

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Order those kept by token load, then the others."""
        serving = Split(replicas).serving
        least = self._affinity * query.num_tokens
        sticky = {one.replica for one in serving if query.overlap.get(one.replica, 0) >= least}
        waits = {one.replica: one.queued_prefill_tokens / one.prefill_rate for one in serving}
        others = [wait for name, wait in waits.items() if name not in sticky]
        if sticky and others and min(waits[name] for name in sticky) - min(others) > self._max_penalty_s:
            sticky = set()

        def load(candidate: Candidate) -> tuple[bool, float]:
            tokens = candidate.queued_prefill_tokens + _uncached(query, candidate)
            return (candidate.replica not in sticky, min(tokens, self._most_tokens))

        return _ranked(query, replicas, rng, "sticky", load)


def _uncached(query: RouteQuery, candidate: Candidate) -> int:
    return uncached_tokens(query.num_tokens, query.overlap.get(candidate.replica, 0))


def _ranked(
    query: RouteQuery,
    replicas: Sequence[Candidate],
    rng: random.Random,
    policy: str,
    key: Callable[[Candidate], tuple[float, ...]],
) -> Decision:
    """Order all replicas by `key`, ties by chance."""
    split = Split(replicas)
    ordered = list(split.serving)
    rng.shuffle(ordered)
    ordered.sort(key=key)
    return split.decision([candidate.replica for candidate in ordered], "rule", policy, query)


RIVALS: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "round_robin": RoundRobinPolicy,
        "pow2": PowerOfTwoPolicy,
        "affinity": AffinityPolicy,
        "kv_aware": KVAwarePolicy,
        "sticky": StickyPolicy,
        "threshold": ThresholdPolicy,
        "linear": LinearPolicy,
        "product": ProductPolicy,
        "product_queue": lambda: ProductPolicy(with_queue=True),
    }
)

SIMULATED: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {**POLICIES, "cost": CostPolicy, "cost_fetch": POLICIES["cost"], **RIVALS}
)
"""All policies that can be simulated: Raydix's, `cost` that counts on fetches, and the rivals' rules."""
