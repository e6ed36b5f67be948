"""Serve's `RequestRouter` between ingress and engines: it asks this process's placer, never waits, never raises.

Serve sets four traps. An exception in `choose_replicas` would hang the request, so all are caught. Serve runs few
routing tasks at once, so nothing here awaits. Serve pickles the class by value, so its state is in `router.state`.
Without `should_backoff` a full fleet would make the routing loop spin.
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
    """Routes each prompt as the placer's policy decides, and all other calls to the least loaded replica."""

    def initialize_state(self, **settings: Any) -> None:
        """Find this process's state of the deployment; `settings` are `PlacerSettings`.

        Different settings reach only an ingress that an update is about to replace. It keeps its own: an exception
        here would leave its requests without a router.
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
        """Return the first choice, the runner-up and all others, one list each. Never raises, never waits."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        request = _generate_request(pending_request)
        order = list(by_id)
        try:
            order = self._order(request, order, pending_request)
        except Exception:
            self._placer.num_errors += 1
            logger.exception("the routing policy failed; the request goes to the least loaded replica")
            order = self._placer.place_blindly(getattr(request, "request_id", None), order)
        ranks = [order[:1], order[1:2], order[2:]]
        return [[by_id[id_] for id_ in rank] for rank in ranks if rank]

    def _order(self, request: Any, candidates: list[str], pending: PendingRequest | None) -> list[str]:
        if request is None:
            return self._placer.place_blindly(None, candidates)
        return list(self._placer.place(request, candidates, _avoided(pending)).order)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Correct the booking: Serve may have taken another replica than the first choice."""
        request = _generate_request(pending_request)
        if request is not None:
            self._placer.overrule(request.request_id, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Tell the fleet the addresses of the replicas that exist now."""
        super().update_replicas(replicas)
        self._fleet.update({replica.replica_id.unique_id: _address(replica) for replica in replicas})


def _generate_request(pending: PendingRequest | None) -> Any:
    """Return the request to place, recognised by its attributes: a class pickled by value must not bring copies of
    types along.
    """
    argument = pending.args[0] if pending is not None and pending.args else None
    return argument if hasattr(argument, "prompt_ids") else None


def _avoided(pending: PendingRequest | None) -> frozenset[str]:
    """Return the replicas that refused this request before, or were lost with it."""
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
