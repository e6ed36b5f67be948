"""Serve's `RequestRouter` of the engines: it asks this process's placer, never waits, never raises.

Ingresses send their requests over the wire. Through Serve come only their watches of single replicas, and the
requests of programs that call the engines' deployment through a handle.

Serve sets four traps. An exception in `choose_replicas` would hang the request, so all are caught. Serve runs few
routing tasks at a time, so nothing here awaits. Serve pickles the class by value, so state is in `router.state`.
Without `should_backoff` a full fleet would make the routing loop spin.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from router.addresses import KVAddress, ReplicaAddress
from router.placer import PlacerSettings
from router.ray_internals import back_off, call_id, deployment_of, first_argument, metadata_of
from router.state import SettingsDiffer, router_state

logger = logging.getLogger("ray.serve")


class PrefixRouter(RequestRouter):
    """Routes each request as the placer's policy decides, a watch to its replica, and other calls by load."""

    def initialize_state(self, fleet: str, **settings: Any) -> None:
        """Find this process's state of the fleet, which the deployments of all roles share; `settings` are
        `PlacerSettings`.

        Different settings reach only an ingress that an update is about to replace. It keeps its own, because
        an exception here would leave its requests without a router.
        """
        app, self._deployment = deployment_of(self)
        try:
            state = router_state(app, fleet, PlacerSettings(**settings))
        except SettingsDiffer as error:
            logger.error("%s", error)
            state = error.state
        self._fleet, self._placer = state.fleet, state.placer
        self._requests: dict[str, str] = {}
        """Ids of the requests that are open, by the ids that Serve gives their calls."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the first choice, the runner-up and all others, one list each. Never raises, never waits."""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        try:
            if pending_request is not None:
                back_off(pending_request)
            order = self._order(list(by_id), pending_request)
        except Exception:
            logger.exception("a call could not be routed; it goes to any replica")
            order = list(by_id)
        ranks = [order[:1], order[1:2], order[2:]]
        return [[by_id[id_] for id_ in rank] for rank in ranks if rank]

    def _order(self, candidates: list[str], pending: PendingRequest | None) -> Sequence[str]:
        """Order the candidates for a call. Its argument is recognised by its attributes, because a class that is
        pickled by value must not bring copies of types along.
        """
        argument: Any = None if pending is None else first_argument(pending)
        if hasattr(argument, "watched_replica"):
            return [replica for replica in candidates if replica == argument.watched_replica]
        if pending is None or not hasattr(argument, "prompt_ids"):
            return self._placer.place_blindly(None, candidates)
        self._fleet.open(argument.request_id)
        self._requests[call_id(pending)] = argument.request_id
        return self._placer.order(argument, candidates)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Correct the booking: Serve may have chosen another replica than the first choice."""
        request_id = self._requests.get(call_id(pending_request))
        if request_id is not None:
            self._placer.overrule(request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forget a request that has ended or was rejected by its replica; Serve routes a rejected one again."""
        request_id = self._requests.pop(internal_request_id, None)
        if request_id is not None:
            self._placer.release(request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Pass the addresses of this deployment's present replicas to the fleet."""
        super().update_replicas(replicas)
        addresses = {replica.replica_id.unique_id: address_of(replica) for replica in replicas}
        self._fleet.update(addresses, self._deployment)


_ADVERTISED = ("wire_endpoint", "wire_secret", "wire_public_key", "wire_epoch")


def address_of(replica: RunningReplica) -> ReplicaAddress | None:
    """Return the address that a replica advertised; None for one without a wire, or with another version's."""
    metadata = metadata_of(replica)
    if any(key not in metadata for key in _ADVERTISED):
        return None
    return ReplicaAddress(
        replica.replica_id.unique_id,
        metadata["wire_endpoint"],
        metadata["wire_secret"],
        int(metadata["wire_epoch"]),
        metadata["wire_public_key"],
        KVAddress.advertised(metadata),
        metadata.get("role", ""),
        metadata.get("store", ""),
    )
