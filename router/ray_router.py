"""Serve's `RequestRouter` for the handle ingress -> engine: asks this process's placer, never waits, never raises.

Serve's traps, and what is done about them: an exception in `choose_replicas` would hang the request (all is
caught); routing tasks are few (nothing awaits); the class is pickled by value (state lives in `router.state`);
without `should_backoff` a full fleet would spin the routing loop.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from router.fleet import ReplicaAddress
from router.placer import PlacerSettings
from router.state import SettingsDiffer, router_state

logger = logging.getLogger("ray.serve")


class PrefixRouter(RequestRouter):
    """Prompts go where they are cheapest. Handles any method of the deployment."""

    def initialize_state(self, **settings: Any) -> None:
        """Take `PlacerSettings` from `request_router_kwargs`; find this process's state of the deployment.

        Other settings come only to an ingress that an update is about to replace. It keeps those it has: an
        exception here would leave its requests without a router.
        """
        app, deployment = self._deployment_id.app_name, self._deployment_id.name
        try:
            state = router_state(app, deployment, PlacerSettings(**settings))
        except SettingsDiffer as error:
            logger.error("%s", error)
            state = error.state
        self._fleet, self._placer = state.fleet, state.placer

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """First choice, runner-up, all others. Never raises, never waits."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        request = _generate_request(pending_request)
        order = list(by_id)
        try:
            order = self._order(request, order, pending_request)
        except Exception:
            self._placer.num_errors += 1
            logger.exception("a request could not be placed; it goes to the least loaded replica")
            order = self._placer.place_blindly(getattr(request, "request_id", None), order)
        ranks = [order[:1], order[1:2], order[2:]]
        return [[by_id[id_] for id_ in rank] for rank in ranks if rank]

    def _order(self, request: Any, candidates: list[str], pending: PendingRequest | None) -> list[str]:
        if request is None:
            return self._placer.place_blindly(None, candidates)
        return list(self._placer.place(request, candidates, _avoided(pending)).order)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve may have taken another than the first choice."""
        request = _generate_request(pending_request)
        if request is not None:
            self._placer.overrule(request.request_id, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The replicas changed: the fleet learns their addresses."""
        super().update_replicas(replicas)
        self._fleet.update({replica.replica_id.unique_id: _address(replica) for replica in replicas})


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
    return ReplicaAddress(
        replica.replica_id.unique_id,
        metadata["wire_endpoint"],
        metadata["wire_secret"],
        int(metadata["wire_epoch"]),
    )
