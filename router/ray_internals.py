"""All names of Ray and Serve that Raydix uses beyond their public APIs, for the version in `pyproject.toml`.

`PRIVATE_NAMES` says for each name how it is used, why no public API suffices, and what breaks without it. Below
is a function for each that is called; no other module uses such a name (`tests/house/test_private_names.py`).
`tests/router/test_ray_internals.py` has a test for each: run these first with another version of Ray.

The module imports Ray only where a function needs it, so it can be used in a process without Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
    from ray.serve.schema import ServeDeploySchema


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name of Ray's or Serve's that no public API promises."""

    name: str
    use: str
    """Its use in Raydix."""
    why: str
    """Why no public API suffices."""
    breaks: str
    """The failure when it is missing or means something else."""


PRIVATE_NAMES: Mapping[str, PrivateName] = {
    each.name: each
    for each in (
        # --- routing: in every process with a handle
        PrivateName(
            "RequestRouter._deployment_id",
            use="finds the state of the deployment that a router routes for",
            why="the public property app_name does not distinguish two models of one application",
            breaks="no router starts: ingresses know no engine, and every request is answered with 503",
        ),
        PrivateName(
            "RequestRouter.update_replicas",
            use="passes the replicas and their addresses to the fleet",
            why="routers are public, but this hook of theirs is not documented",
            breaks="ingresses notice neither new engines nor the end of old ones",
        ),
        PrivateName(
            "PendingRequest.routing_context.should_backoff",
            use="has Serve wait before it asks the router again for a call that no replica took",
            why="Serve's own experimental routers set it, and the documentation does not mention it",
            breaks="while a call waits for its replica, Serve's routing loop occupies the event loop",
        ),
        PrivateName(
            "PendingRequest.args",
            use="reads the call's first argument: the request to place, or the replica to watch",
            why="the field is public; but not that it holds the call's arguments unchanged",
            breaks="calls go to any replica: deaths are noticed late, and programs' prompts miss caches",
        ),
        PrivateName(
            "PendingRequest.metadata.internal_request_id",
            use="finds, at a call's end, the request that was booked for it",
            why="on_request_completed is public and gets this id; the other place that has it is not documented",
            breaks="requests of programs with a handle count as load forever",
        ),
        PrivateName(
            "RunningReplica.replica_metadata",
            use="carries each engine's address on the wire to the ingresses",
            why="no public API carries a value from a replica to its callers' routers",
            breaks="ingresses connect to no engine, and every request is answered with 503",
        ),
        # --- hooks: names that Serve looks up in a deployment's class
        PrivateName(
            "record_replica_metadata",
            use="an engine's address on the wire, after its warm-up; the start of the hub's own server",
            why="as for RunningReplica.replica_metadata",
            breaks="engines never start their loops, and no ingress learns their addresses",
        ),
        PrivateName(
            "record_autoscaling_stats",
            use="reports an engine's work to the autoscaling policy",
            why="documented as alpha; it is the only way to scale by anything but open calls",
            breaks="the number of replicas stays as it is, whatever the load",
        ),
        PrivateName(
            "__serve_build_asgi_app__",
            use="builds the ingress's API on the event loop that serves it",
            why="the documented forms need an application that exists before the process does",
            breaks="ingresses do not start",
        ),
        # --- inside a replica's process
        PrivateName(
            "global_worker.actors[...]._replica_impl._shutting_down",
            use="refuses new requests once Serve begins to stop a replica",
            why="Serve waits for open calls and only then notifies the user's class, by __del__",
            breaks="silently: replicas that are being stopped take requests, which then must migrate",
        ),
        PrivateName(
            "ray.serve.context._set_request_context",
            use="puts the x-request-id into log records of requests that bypass Serve's proxy",
            why="only Serve's proxy names requests",
            breaks="ingresses do not start",
        ),
        PrivateName(
            "ray.serve._private.replica.add_port_to_grpc_server",
            use="makes the server for Serve's calls between replicas listen on 127.0.0.1 in `raydix serve`",
            why="each replica starts one, on all interfaces, and no setting says where",
            breaks="silently: a `raydix serve` opens a port to the network for each of its processes",
        ),
        # --- Serve's controller
        PrivateName(
            "ray.serve._private.constants.SERVE_CONTROLLER_NAME",
            use="finds Serve's controller",
            why="the REST API needs Ray's dashboard, which many clusters disable",
            breaks="models cannot be loaded or unloaded, and /v1/cluster shows no replicas",
        ),
        PrivateName(
            "ray.serve._private.constants.SERVE_NAMESPACE",
            use="the namespace of the controller; `raydix serve` joins it",
            why="as for SERVE_CONTROLLER_NAME",
            breaks="as for SERVE_CONTROLLER_NAME, and `raydix serve` does not start",
        ),
        PrivateName(
            "ServeController.get_serve_instance_details",
            use="reads each deployment's replicas and target, and the port of Serve's proxy",
            why="serve.status() has neither replicas nor targets",
            breaks="ingresses do not start, because the state of their models is unknown",
        ),
        PrivateName(
            "ServeController.update_deployment_replicas",
            use="loads and unloads models by setting the number of their replicas",
            why="the REST API for it needs Ray's dashboard",
            breaks="POST /v1/models/{name}/load and /unload fail",
        ),
        PrivateName(
            "ray.serve._private.common.DeploymentID",
            use="names a deployment to the controller",
            why="the type of that argument",
            breaks="as for update_deployment_replicas",
        ),
        PrivateName(
            "ray.serve.autoscaling_policy._apply_delay_logic",
            use="`raydix simulate --autoscale` delays decisions as Serve does, on simulated time",
            why="Serve applies its delays inside the controller, on the wall clock",
            breaks="`raydix simulate --autoscale` fails",
        ),
        # --- the cluster
        PrivateName(
            "ray.serve._private.api.serve_start",
            use="`raydix serve` starts Serve with all options of a config file",
            why="serve.start() takes no controller options",
            breaks="`raydix serve` fails at its start",
        ),
        PrivateName(
            "ServeControllerClient.deploy_apps",
            use="`raydix serve` deploys a config file as `serve run` does",
            why="the public `serve deploy` needs Ray's dashboard",
            breaks="`raydix serve` fails at its start",
        ),
        PrivateName(
            "ray._private.parameter.RayParams",
            use="`raydix serve` starts Ray without its autoscaler and, unless it shows logs, its log monitor",
            why="ray.init() has no arguments for them",
            breaks="`raydix serve` does not start",
        ),
        PrivateName(
            "ray._private.node.Node.start_api_server",
            use="`raydix serve` starts Ray without its API server, for which ray.init() would wait seconds",
            why="ray.init(include_dashboard=False) starts it too, only to send usage statistics",
            breaks="`raydix serve` does not start",
        ),
        PrivateName(
            "ray._private.services.find_gcs_addresses",
            use="`raydix deploy` refuses to choose between several Rays of this machine",
            why='ray.init("auto") takes any of them',
            breaks="`raydix deploy` fails where RAY_ADDRESS is not set",
        ),
        PrivateName(
            "ray._private.worker._global_node.dead_processes",
            use="`raydix serve` ends when the raylet or the GCS that it has started is gone",
            why="Ray does not notify a driver when its raylet dies, and nothing starts another",
            breaks="`raydix serve` stays and answers every request with 503 after the raylet's death",
        ),
        PrivateName(
            "ray._private.state.available_resources_per_node",
            use="checks whether a node has room for one more replica during a change",
            why="ray.available_resources() is the sum of all nodes, and ray.nodes() includes what is in use",
            breaks="no change of a deployed config is built, and the service continues unchanged",
        ),
        PrivateName(
            "HEAD_NODE_RESOURCE_NAME",
            use="finds the cluster's head node",
            why="ray.nodes() marks it only by this resource",
            breaks="/v1/cluster/nodes shows no node as the head",
        ),
        PrivateName(
            "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree.PrefixTree",
            use="`raydix simulate` compares Raydix's router with Ray Serve LLM's own",
            why="Ray Serve LLM offers its tree only as a part of its router",
            breaks="`raydix simulate --policy affinity` says that it cannot run",
        ),
    )
}
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
