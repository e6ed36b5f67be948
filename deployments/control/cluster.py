"""The cluster's present state: Ray's nodes, Serve's replicas, torch's GPUs, and this ingress's own fleets.

    Ray (GCS)              nodes, their CPUs, GPUs and memory     in a thread: Ray's calls block
    Serve's controller     replicas, their states and nodes
    engine replicas        their GPUs' memory
    this process           queues and KV pages, from the wire

Each source has `timeout_s` to answer. If one does not, its part is omitted and "missing" says why.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from deployments.client.protocol import EngineClient, FleetHealth
from deployments.control.controller_client import AppView, ControllerUnavailable, DeploymentView, ReplicaView
from deployments.control.model_switch import state_of, together
from deployments.wire.deadlines.time_limit import timeout
from router.ray_internals import is_head

logger = logging.getLogger("ray.serve")
T = TypeVar("T")
Described = Sequence[Mapping[str, Any]]
"""The result of `EngineReplica.describe`, for each replica that answered."""

_TOTALS = ("num_running", "num_waiting", "waiting_prefill_tokens", "kv_pages_free", "kv_pages_total")
"""Fields of `ReplicaHealth` that are summed over the replicas."""


@dataclass(frozen=True, slots=True)
class ClusterModel:
    """One model, as the cluster's state needs it."""

    name: str
    fleet: str
    """The name of its deployment, or the common prefix of the names of its roles' deployments."""
    deployments: tuple[str, ...]
    client: EngineClient
    describe: Callable[[], Awaitable[Described]]
    """Asks all replicas of the model to describe themselves."""


class Cluster:
    """Answers /v1/cluster. While a source hangs, further requests wait for the one call in progress."""

    def __init__(
        self,
        models: Sequence[ClusterModel],
        view: Callable[[], Awaitable[AppView]],
        ray_nodes: Callable[[], list[dict[str, Any]]],
        ray_available: Callable[[], dict[str, float]],
        versions: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """`ray_nodes` and `ray_available` are `ray.nodes` and `ray.available_resources`, which block."""
        self._models, self._view, self._timeout_s = models, view, timeout_s
        self._ray_nodes, self._ray_available = ray_nodes, ray_available
        self._versions = {**versions, "python": platform.python_version()}
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="cluster")
        self._asking: dict[str, asyncio.Future[Any]] = {}

    async def status(self) -> dict[str, Any]:
        """Return the body of /v1/cluster/status: versions, resources, each model's replicas, and totals."""
        missing: dict[str, str] = {}
        nodes, available, view, fleets = await asyncio.gather(
            self._ask("nodes", self._nodes, missing),
            self._ask("available_resources", lambda: self._in_thread(self._ray_available), missing),
            self._ask("replicas", self._view, missing),
            asyncio.gather(*(model.client.health() for model in self._models)),
        )
        alive = [node for node in nodes or [] if node["is_alive"]]
        resources: dict[str, Any] = {}
        if nodes is not None:
            resources["total"] = {name: sum(node[name] for node in alive) for name in ("cpus", "gpus")}
        if available is not None:
            resources["available"] = {"cpus": available.get("CPU", 0.0), "gpus": available.get("GPU", 0.0)}
        return {
            "object": "cluster.status",
            "versions": self._versions,
            "nodes": None if nodes is None else {"alive": len(alive), "dead": len(nodes) - len(alive)},
            "resources": resources,
            "models": [_model(model, fleet, view) for model, fleet in zip(self._models, fleets, strict=True)],
            "totals": _totals(fleets),
            "missing": missing,
        }

    async def nodes(self) -> dict[str, Any]:
        """Return the body of /v1/cluster/nodes: every node with its resources, GPUs and replicas."""
        missing: dict[str, str] = {}
        nodes, view, *described = await asyncio.gather(
            self._ask("nodes", self._nodes, missing),
            self._ask("replicas", self._view, missing),
            *(self._ask(f"gpu_devices of {m.name}", self._describe(m), missing) for m in self._models),
        )
        gpus = {one["replica"]: one.get("gpus", []) for of_model in described for one in of_model or ()}
        for node in nodes or []:
            _place_replicas(node, self._models, view, gpus)
        return {"object": "list", "data": nodes or [], "missing": missing}

    async def _nodes(self) -> list[dict[str, Any]]:
        return [_node(node) for node in await self._in_thread(self._ray_nodes)]

    def _describe(self, model: ClusterModel) -> Callable[[], Awaitable[Described]]:
        async def describe() -> Described:
            return await model.describe() if (await model.client.health()).num_up else ()

        return describe

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _ask(self, what: str, source: Callable[[], Awaitable[T]], missing: dict[str, str]) -> T | None:
        asking = self._asking.get(what)
        if asking is None or asking.done():
            asking = self._asking[what] = asyncio.ensure_future(_started(source))
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            with timeout(self._timeout_s):
                answer: T = await asyncio.shield(asking)
            return answer
        except TimeoutError:
            missing[what] = f"no answer within {self._timeout_s:g} s"
        except ControllerUnavailable as error:
            missing[what] = str(error)
        except Exception as error:
            logger.warning("the state of the cluster lacks %s: %s", what, error)
            missing[what] = f"failed with {type(error).__name__}"
        return None


async def _started(source: Callable[[], Awaitable[T]]) -> T:
    return await source()


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an entry of `ray.nodes()`, with its resources in total, whether free or in use."""
    resources = node.get("Resources", {})
    accelerators = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    return {
        "node_id": node["NodeID"],
        "address": node.get("NodeManagerAddress"),
        "hostname": node.get("NodeManagerHostname"),
        "is_alive": bool(node.get("Alive")),
        "is_head": is_head(resources),
        "cpus": resources.get("CPU", 0.0),
        "gpus": resources.get("GPU", 0.0),
        "accelerators": accelerators,
        "memory_bytes": int(resources.get("memory", 0)),
        "object_store_bytes": int(resources.get("object_store_memory", 0)),
    }


def _place_replicas(
    node: dict[str, Any], models: Sequence[ClusterModel], view: AppView | None, gpus: Mapping[str, Any]
) -> None:
    """Add a node's engine replicas and the GPUs that they see; nothing where Serve did not report their nodes."""
    if view is None:
        return
    here = [
        (model, replica)
        for model in models
        for replica in (_deployed(model, view) or DeploymentView(0)).replicas
        if replica.node_id == node["node_id"]
    ]
    node["replicas"] = [{"model": model.name, **_location_of(replica)} for model, replica in here]
    devices = {gpu["uuid"]: gpu for _, replica in here for gpu in gpus.get(replica.replica, ())}
    if devices:
        node["gpu_devices"] = list(devices.values())


def _model(model: ClusterModel, fleet: FleetHealth, view: AppView | None) -> dict[str, Any]:
    deployment = None if view is None else _deployed(model, view)
    heard = {health.replica: asdict(health) for health in fleet.replicas}
    known = {replica.replica: _location_of(replica) for replica in deployment.replicas} if deployment else {}
    return {
        "id": model.name,
        "deployment": model.fleet,
        "state": None if deployment is None else state_of(deployment),
        "replicas_wanted": None if deployment is None else deployment.target,
        "replicas": [{**heard.get(name, {}), **known.get(name, {})} for name in sorted({*heard, *known})],
        "totals": _totals([fleet]),
    }


def _deployed(model: ClusterModel, view: AppView) -> DeploymentView | None:
    """Return a model's deployments as if they were one; None while Serve knows none of them."""
    known = {name: view.deployments[name] for name in model.deployments if name in view.deployments}
    return together(known) if known else None


def _location_of(replica: ReplicaView) -> dict[str, Any]:
    return {
        "replica": replica.replica,
        "state": replica.state,
        "node_id": replica.node_id,
        "address": replica.node_address,
        "pid": replica.pid,
    }


def _totals(fleets: Sequence[FleetHealth]) -> dict[str, int]:
    replicas = [replica for fleet in fleets for replica in fleet.replicas]
    return {name: sum(getattr(replica, name) for replica in replicas) for name in _TOTALS}
