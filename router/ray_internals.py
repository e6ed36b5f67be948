"""All names of Ray and Serve that Raydix uses beyond their public APIs, for the version in `pyproject.toml`.

docs/frameworks.md says for each name how it is used, why no public API suffices, and what breaks without it. Below
is a function for each that is called; no other module uses such a name (`tests/house/test_private_names.py`).
`tests/router/test_ray_internals.py` has a test for each: run these first with another version of Ray.

The module imports Ray only where a function needs it, so it can be used in a process without Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
    from ray.serve.schema import ServeDeploySchema


HEAD_NODE_RESOURCE_NAME = "node:__internal_head__"


# --- routing --------------------------------------------------------------------------------------------


def deployment_of(router: RequestRouter) -> tuple[str, str]:
    """Return the application and the deployment that a router routes for."""
    return router._deployment_id.app_name, router._deployment_id.name


def back_off(call: PendingRequest) -> None:
    """Make Serve wait, a little longer each time, before it routes this call again."""
    call.routing_context.should_backoff = True


def first_argument(call: PendingRequest) -> Any:
    """Return the call's first positional argument; None where it has none."""
    return call.args[0] if call.args else None


def call_id(call: PendingRequest) -> str:
    """Return the id with which Serve reports to a router that this call has ended."""
    return str(call.metadata.internal_request_id)


def metadata_of(replica: RunningReplica) -> Mapping[str, Any]:
    """Return the result of the replica's `record_replica_metadata`."""
    metadata: Mapping[str, Any] = replica.replica_metadata
    return metadata


# --- inside a replica's process -------------------------------------------------------------------------


def serve_is_stopping() -> bool:
    """Whether Serve has asked this process's replica to shut down. Costs well under a microsecond.

    False where it cannot be read; a draining replica then still accepts requests.
    """
    worker = getattr(sys.modules.get("ray._private.worker"), "global_worker", None)
    replicas = (getattr(actor, "_replica_impl", None) for actor in getattr(worker, "actors", {}).values())
    return any(getattr(replica, "_shutting_down", False) for replica in replicas)


def request_namer() -> Callable[[str], None]:
    """Return a function that puts a request's id into all that Serve logs in the request's context."""
    from ray.serve.context import _set_request_context

    return lambda name: _set_request_context(request_id=name)


def keep_calls_on_this_machine() -> None:
    """Make Serve's server in this replica's process listen on the node's address if that is a loopback address.

    Call it before the replica is ready, because the server starts then. Does nothing in a process without Ray.
    """
    import ray

    if not ray.is_initialized():
        return
    host = ray.util.get_node_ip_address()
    if ip_address(host).is_loopback:
        from ray.serve._private import replica

        add_port = replica.add_port_to_grpc_server
        on_node = f"[{host}]" if ":" in host else host
        replica.add_port_to_grpc_server = lambda server, at: add_port(server, at.replace("[::]", on_node))


# --- Serve's controller ---------------------------------------------------------------------------------


def find_controller() -> Any:
    """Return the handle of Serve's controller. Blocks. Raises ValueError when Serve does not run."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME

    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=serve_namespace())


async def instance_details(controller: Any) -> Mapping[str, Any]:
    """Return all that Serve knows of its applications, in the form of `ray.serve.schema.ServeInstanceDetails`."""
    details: Mapping[str, Any] = await controller.get_serve_instance_details.remote()
    return details


def target_replicas(app: str, timeout_s: float = 5.0) -> dict[str, int]:
    """Return each deployment's target number of replicas in an application; empty if Serve is silent. Blocks."""
    import ray

    try:
        deployments = serve_details(timeout_s).get(app, {}).get("deployments", {})
    except ray.exceptions.RayError:
        return {}
    return {name: one["target_num_replicas"] for name, one in deployments.items()}


def serve_details(timeout_s: float) -> Mapping[str, Any]:
    """Return all that Serve knows of each application; empty where Serve does not run. Blocks. Raises RayError."""
    import ray

    try:
        controller = find_controller()
    except ValueError:
        return {}
    details = ray.get(controller.get_serve_instance_details.remote(), timeout=timeout_s)
    applications: Mapping[str, Any] = details["applications"]
    return applications


async def set_replicas(controller: Any, app: str, deployment: str, count: int) -> None:
    """Set a deployment's target. Needs `external_scaler_enabled: true` in the application's config."""
    from ray.serve._private.common import DeploymentID

    await controller.update_deployment_replicas.remote(DeploymentID(name=deployment, app_name=app), count)


def apply_scaling_delays(desired: int, target: int, settings: Any, state: dict[str, Any], now: float) -> int:
    """Return the target that Serve sets at `now` when its policy desires another; `state` is kept between calls.

    `settings` has the delays under the names that they have in `ray.serve.config.AutoscalingConfig`.
    """
    from ray.serve.autoscaling_policy import _apply_delay_logic

    return int(_apply_delay_logic(desired, target, settings, state, now)[0])


# --- the cluster ----------------------------------------------------------------------------------------


def serve_namespace() -> str:
    """Return the namespace of Serve's own actors."""
    from ray.serve._private.constants import SERVE_NAMESPACE

    return str(SERVE_NAMESPACE)


def deploy(config: ServeDeploySchema) -> None:
    """Start Serve where it does not run, and deploy the config as `serve run` does, without waiting for it."""
    from ray.serve._private import api
    from ray.serve.config import gRPCOptions

    client = api.serve_start(
        http_options=config.http_options.model_dump(),
        grpc_options=gRPCOptions(**config.grpc_options.model_dump()),
        proxy_location=config.proxy_location,
        controller_options=config.controller_options,
    )
    client.deploy_apps(config, _blocking=False)


@contextmanager
def few_ray_processes(*, shows_logs: bool) -> Iterator[None]:
    """Keep `ray.init(include_dashboard=False)` meanwhile from starting processes that one machine does not use.

    These are the autoscaler's monitor, because there is no other machine to add; the API server, which only sends
    usage statistics, unless these are on; and the log monitor, unless it `shows_logs` of workers here.
    """
    from ray._private import parameter
    from ray._private.node import Node

    params, start_api_server = parameter.RayParams, Node.start_api_server
    parameter.RayParams = partial(params, no_monitor=True, include_log_monitor=shows_logs)
    if os.environ.get("RAY_USAGE_STATS_ENABLED") == "0":
        Node.start_api_server = lambda self, **_: None
    try:
        yield
    finally:
        parameter.RayParams, Node.start_api_server = params, start_api_server


def rays_of_this_machine() -> frozenset[str]:
    """Return the addresses of all Rays whose head runs on this machine, including those of other users."""
    from ray._private import services

    return frozenset(services.find_gcs_addresses())


def ended_ray_processes() -> list[str]:
    """The kinds of processes that `ray.init` has started here and that have ended, such as "raylet"."""
    from ray._private import worker

    node = worker._global_node
    return [] if node is None else [kind for kind, _ in node.dead_processes()]


def free_resources() -> list[Mapping[str, float]]:
    """Return the free resources of each node of the connected cluster; empty without a cluster."""
    import ray
    from ray._private.state import available_resources_per_node

    return list(available_resources_per_node().values()) if ray.is_initialized() else []


def is_head(resources: Mapping[str, float]) -> bool:
    """Whether a node with these resources (`ray.nodes()`) is the cluster's head."""
    return HEAD_NODE_RESOURCE_NAME in resources


def prefix_tree() -> Any:
    """Return a new prefix tree of Ray Serve LLM's router. Raises ImportError without Ray's part for LLMs."""
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

    return PrefixTree()
