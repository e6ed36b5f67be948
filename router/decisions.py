"""The log of routing decisions: why each request went to its replica, how good the choice was, and totals.

A record has every term of the cost, the runner-up and the predicted hit; the engine's actual hit is added with the
first token.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cache.news.tier import Tier
from router.cost import RouteQuery, Terms
from router.fetch.fetch_sources import PlannedFetch
from router.overlap import Overlap
from router.policies import Decision


@dataclass(slots=True)
class DecisionRecord:
    """One placement. All values are plain, because it is sent as JSON."""

    request_id: str
    """Id of the attempt: a retry or a migration is a decision of its own, named "<request>~<number>"."""
    at: float
    """Unix seconds."""
    model: str
    policy: str
    reason: str
    num_tokens: int
    """Tokens that need KV: the prompt, and the tokens that another replica has generated already."""
    utilisation: float
    """Share of the fleet's prefill capacity in use at the time, 0..1."""
    replica: str
    """The replica that received it."""
    runner_up: str | None
    predicted_cached: int
    """Tokens cached there according to the index, with those that it should load from files."""
    predicted_tiers: dict[str, int]
    """Those tokens by their tier: "device", "host", "file"."""
    regret_tokens: int
    """Tokens that the best holder able to serve had and the chosen replica neither had nor was to fetch."""
    terms: dict[str, Terms] = field(default_factory=dict)
    """The cost of each replica that was compared, in seconds; empty for policies that do not compare."""
    fetch_from: str | None = None
    """The replica from which the chosen one was asked to fetch KV; None: from none."""
    fetch_tokens: int = 0
    """Tokens that it was asked to fetch."""
    actual_cached: int | None = None
    """Tokens that the engine found in its cache, fetched ones included; None until the first token."""
    is_overruled: bool = False
    """Whether Serve took another replica because the first choice had no room."""


def as_json(record: DecisionRecord) -> dict[str, Any]:
    """Return a record as JSON types: objects, strings and numbers."""
    return dataclasses.asdict(record)


def by_tier(overlap: Mapping[str, int], replica: str) -> dict[str, int]:
    """Return the tokens that a replica holds, by the name of the tier; tiers with none are omitted."""
    held = overlap.get(replica, 0)
    below = overlap.below(replica) if held and isinstance(overlap, Overlap) else ()
    if not below:
        return {"device": held} if held else {}
    tokens = (held - sum(below), *below)
    return {tier.name.lower(): tokens[tier] for tier in Tier if tier < len(tokens) and tokens[tier]}


class DecisionLog:
    """Keeps the last `capacity` decisions. Not thread-safe: its owner locks."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the number of decisions kept must be at least 1, got {capacity}")
        self._capacity = capacity
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()
        self.by_reason: Counter[tuple[str, str]] = Counter()
        """(policy, reason) -> placements since the process started."""
        self.regret_tokens = 0
        self.predicted_tokens = 0
        """Tokens of requests that have their first token, as in `actual_tokens`."""
        self.actual_tokens = 0

    def add(
        self,
        request_id: str,
        at: float,
        model: str,
        query: RouteQuery,
        decision: Decision,
        fetch: PlannedFetch | None = None,
    ) -> None:
        """Record that a request was placed at `decision.order[0]`, which fetches `fetch` for it, if anything."""
        chosen = decision.order[0]
        num_fetched = 0 if fetch is None else fetch.fetched
        tiers = by_tier(query.overlap, chosen)
        if fetch is not None and fetch.address is None:  # It reads its own files without asking another replica.
            tiers, fetch = {**tiers, Tier.FILE.name.lower(): num_fetched}, None
        regret_tokens = max(decision.regret_tokens - num_fetched, 0)
        self.by_reason[decision.policy, decision.reason] += 1
        self.regret_tokens += regret_tokens
        self._records[request_id] = DecisionRecord(
            request_id=request_id,
            at=at,
            model=model,
            policy=decision.policy,
            reason=decision.reason,
            num_tokens=query.num_tokens,
            utilisation=query.utilisation,
            replica=chosen,
            runner_up=decision.order[1] if len(decision.order) > 1 else None,
            predicted_cached=sum(tiers.values()),
            predicted_tiers=tiers,
            regret_tokens=regret_tokens,
            terms=dict(decision.terms),
            fetch_from=None if fetch is None else fetch.source,
            fetch_tokens=0 if fetch is None else num_fetched,
        )
        while len(self._records) > self._capacity:
            self._records.popitem(last=False)

    def overrule(self, request_id: str, replica: str, overlap: Mapping[str, int]) -> None:
        """Record that a request went elsewhere; ignore a request that is no longer remembered."""
        record = self._records.get(request_id)
        if record is not None:
            record.replica, record.is_overruled = replica, True
            record.predicted_cached, record.predicted_tiers = overlap.get(replica, 0), by_tier(overlap, replica)
            record.fetch_from, record.fetch_tokens = None, 0

    def settle(self, request_id: str, num_cached: int) -> None:
        """Record how many cached tokens the engine found for a request, which its first token reports."""
        record = self._records.get(request_id)
        if record is None or record.actual_cached is not None:
            return
        record.actual_cached = num_cached
        self.predicted_tokens += record.predicted_cached + record.fetch_tokens
        self.actual_tokens += num_cached

    def get(self, request_id: str) -> DecisionRecord | None:
        """Return the record of a recent request, or None."""
        return self._records.get(request_id)

    def latest(self, limit: int) -> list[DecisionRecord]:
        """Return the last `limit` records, newest first."""
        newest = list(reversed(self._records.values()))
        return newest[: max(limit, 0)]
