"""Serve's `RequestRouter` for the handle ingress -> engine: placement by prefix and load, from local memory.

Serve's traps, and what is done about them: an exception in `choose_replicas` would hang the request (all is
caught); routing tasks are few (nothing awaits); the class is pickled by value (state lives in `router.fleet`);
without `should_backoff` a full fleet would spin the routing loop.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cache.node import Namespace
from cache.prefix_hash import prefix_key, prefix_root
from router.fleet import Fleet, ReplicaAddress, fleet_of
from router.placement import Placement, SpillRule, place
from router.recent import RecentPrefixes

logger = logging.getLogger("ray.serve")


class PrefixRouter(RequestRouter):
    """Prompts that begin alike go to one replica until its queue is long. Handles any method of the deployment."""

    def initialize_state(
        self,
        prefix_tokens: int = 64,
        page_size: int = 16,
        spill_factor: float = 1.5,
        spill_slack: float = 8.0,
    ) -> None:
        """Take the settings from `request_router_kwargs`; find this process's fleet."""
        self._prefix_tokens = prefix_tokens
        self._rule = SpillRule(spill_factor, spill_slack)
        self._recent = RecentPrefixes(page_size)
        self._fleet: Fleet = fleet_of(self._deployment_id.app_name, self._deployment_id.name)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Favourite, second, all others. Never raises, never waits."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        try:
            return self._choose(candidate_replicas, pending_request)
        except Exception:
            logger.exception("the router could not place a request; any replica will do")
            self._fleet.count("error")
            return [list(candidate_replicas)]

    def _choose(
        self, candidates: list[RunningReplica], pending: PendingRequest | None
    ) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id.unique_id: replica for replica in candidates}
        loads, lost = self._fleet.loads(), self._fleet.lost() | _avoided(pending)
        answering = {id_: loads.get(id_, 0.0) for id_ in by_id if id_ not in lost}
        request = _generate_request(pending)
        key = self._key(request)
        chain = self._recent.chain(request.prompt_ids, _root(request)) if request is not None else []
        placement = place(key, answering, self._rule, self._holder(request, chain, answering))
        order = [*placement.order, *(id_ for id_ in by_id if id_ in lost)]
        if request is not None and order:
            self._book(request.request_id, order, placement)
            self._remember(request, chain, order[0])
        ranks = [order[:1], order[1:2], order[2:]]
        return [[by_id[id_] for id_ in rank] for rank in ranks if rank]

    def _book(self, request_id: str, order: list[str], placement: Placement) -> None:
        self._fleet.count(placement.reason)
        self._fleet.book(request_id, order[0])

    def _holder(self, request: Any, chain: list[int], replicas: Collection[str]) -> str | None:
        """Where a good part of the prompt went before: as much as the key covers, or a third of the prompt.

        Without one, where its session was: a hint, worth following when nothing is known.
        """
        if request is None:
            return None
        replica, num_tokens = self._recent.find(chain, replicas)
        if num_tokens >= min(self._prefix_tokens, len(request.prompt_ids) / 3):
            return replica
        return self._recent.find(_session(request), replicas)[0]

    def _remember(self, request: Any, chain: list[int], replica: str) -> None:
        self._recent.record([*chain, *_session(request)], replica)

    def _key(self, request: Any) -> int | None:
        if request is None:
            return None
        return prefix_key(request.prompt_ids[: self._prefix_tokens], _root(request))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve may have taken another than the first choice: book it where it went."""
        request = _generate_request(pending_request)
        if request is None:
            return
        replica = replica_id.unique_id
        if self._fleet.placement(request.request_id) not in (None, replica):
            self._remember(request, self._recent.chain(request.prompt_ids, _root(request)), replica)
        self._fleet.book(request.request_id, replica)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The replicas changed: the fleet learns their addresses."""
        super().update_replicas(replicas)
        self._fleet.update({replica.replica_id.unique_id: _address(replica) for replica in replicas})


def _root(request: Any) -> int:
    return prefix_root(Namespace(request.model, salt=request.salt))


def _session(request: Any) -> list[int]:
    """What a request's session is remembered by, if it has one."""
    if request.session_id is None:
        return []
    return [prefix_root(Namespace(request.session_id, salt=request.salt))]


def _generate_request(pending: PendingRequest | None) -> Any:
    """The request to place, by shape: this class travels by value and must not bring copies of types."""
    argument = pending.args[0] if pending is not None and pending.args else None
    return argument if hasattr(argument, "prompt_ids") else None


def _avoided(pending: PendingRequest | None) -> frozenset[str]:
    """Replicas that already refused this request, or were lost with it."""
    return frozenset(pending.args[2]) if pending is not None and len(pending.args) > 2 else frozenset()


def _address(replica: RunningReplica) -> ReplicaAddress | None:
    metadata = replica.replica_metadata
    if "wire_endpoint" not in metadata:
        return None
    return ReplicaAddress(replica.replica_id.unique_id, metadata["wire_endpoint"], metadata["wire_secret"])
