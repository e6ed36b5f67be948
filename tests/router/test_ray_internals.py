"""Contracts with Ray: what is not its public API is there and means what Raydix takes it to mean.

No cluster runs here. Where a behaviour needs one, tests/e2e shows it: `test_draining.py`, `test_models.py`,
`test_cluster.py` and `test_autoscaling.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from ray._common import constants as ray_constants
from ray._private import parameter, services, state, worker
from ray._private.node import Node
from ray._private.worker import global_worker
from ray.serve import context
from ray.serve._private import api, client, constants, controller, replica
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.common import RunningReplicaInfo as ReplicaInfo
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ApplicationDetails, DeploymentDetails, ReplicaDetails, ServeInstanceDetails

from router import ray_internals
from router.placer import PlacerSettings
from router.ray_router import PrefixRouter
from tests.router.support.private_names import private_names

ENGINES = DeploymentID(name="engines", app_name="app")
CONTRACTS: dict[str, Callable[[], None]] = {}
PRIVATE_NAMES = private_names()


def contract(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Mark the check of one of `PRIVATE_NAMES`."""

    def mark(check: Callable[[], None]) -> Callable[[], None]:
        CONTRACTS[name] = check
        return check

    return mark


def problem(name: str) -> str | None:
    """What is wrong with a private name in the installed version of Ray; None when its contract holds."""
    told = PRIVATE_NAMES[name]
    try:
        CONTRACTS[name]()
    except Exception as error:
        return (
            f"Ray {ray.__version__}: {name} is missing or has changed ({type(error).__name__}: {error}). "
            f"Raydix uses it for this: {told.use}. Without it: {told.breaks}. Mend {ray_internals.__file__}."
        )
    return None


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_ray_keeps_the_contract(name: str) -> None:
    found = problem(name)
    assert found is None, found


def test_every_private_name_has_a_contract() -> None:
    assert CONTRACTS.keys() == PRIVATE_NAMES.keys()


def test_a_missing_name_is_reported_with_the_feature_that_it_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(replica.Replica, "_perform_graceful_shutdown")
    monkeypatch.delattr(context, "_set_request_context")
    for name in (
        "global_worker.actors[...]._replica_impl._shutting_down",
        "ray.serve.context._set_request_context",
    ):
        found = problem(name)
        assert found is not None
        assert name in found and PRIVATE_NAMES[name].breaks in found


# --- routing --------------------------------------------------------------------------------------------


def router() -> Any:
    """A router as Serve makes it."""
    made = PrefixRouter(deployment_id=ENGINES, handle_source=DeploymentHandleSource.REPLICA)
    made.initialize_state(ENGINES.name, **asdict(PlacerSettings()))
    return made


def pending(*args: Any) -> Any:
    """A call as Serve hands it to a router. Needs a running event loop."""
    metadata = RequestMetadata(request_id="r", internal_request_id="call")
    return PendingRequest(args=list(args), kwargs={}, metadata=metadata)


def running(name: str, **metadata: str) -> Any:
    """A replica as Serve hands it to a router."""

    class Info(ReplicaInfo):
        def get_actor_handle(self) -> Any:
            return SimpleNamespace(_actor_id=name)

    info = Info(ReplicaID(name, ENGINES), "node", "127.0.0.1", None, name, 1, replica_metadata=metadata)
    return RunningReplica(info)


def with_pending(check: Callable[[Any], None], *args: Any) -> None:
    """Check a call on an event loop."""

    async def scenario() -> None:
        check(pending(*args))

    asyncio.run(scenario())


@contract("RequestRouter._deployment_id")
def _() -> None:
    assert ray_internals.deployment_of(router()) == ("app", "engines")


@contract("RequestRouter.update_replicas")
def _() -> None:
    assert list(inspect.signature(RequestRouter.update_replicas).parameters) == ["self", "replicas"]
    assert "update_replicas" in RequestRouter._update_running_replicas.__code__.co_names, "Serve does not call it"


@contract("PendingRequest.routing_context.should_backoff")
def _() -> None:
    def check(call: Any) -> None:
        assert call.routing_context.should_backoff is False
        ray_internals.back_off(call)
        assert call.routing_context.should_backoff is True

    with_pending(check)
    names = RequestRouter._choose_replicas_with_backoff.__code__.co_names
    assert "should_backoff" in names, "Serve's routing loop does not read it"


@contract("PendingRequest.args")
def _() -> None:
    with_pending(lambda call: _is(ray_internals.first_argument(call), "first"), "first", "second")
    with_pending(lambda call: _is(ray_internals.first_argument(call), None))


@contract("PendingRequest.metadata.internal_request_id")
def _() -> None:
    with_pending(lambda call: _is(ray_internals.call_id(call), "call"))
    assert list(inspect.signature(RequestRouter.on_request_completed).parameters)[1:] == [
        "replica_id",
        "internal_request_id",
    ]


@contract("RunningReplica.replica_metadata")
def _() -> None:
    assert dict(ray_internals.metadata_of(running("a", where="there"))) == {"where": "there"}


def test_a_router_that_serve_made_places_a_call_of_serve_s() -> None:
    """The whole of it: a watch arrives at its replica, and another call at one of all."""

    async def scenario() -> None:
        made, candidates = router(), [running("a"), running("b")]
        watch = pending(SimpleNamespace(watched_replica="b"), "ingress")
        assert [
            [one.replica_id.unique_id for one in rank] for rank in await made.choose_replicas(candidates, watch)
        ] == [["b"]]
        assert watch.routing_context.should_backoff
        assert sum(map(len, await made.choose_replicas(candidates, pending()))) == 2

    asyncio.run(scenario())


# --- hooks ----------------------------------------------------------------------------------------------


class Hooked:
    """A deployment with the hooks that engines have."""

    async def record_replica_metadata(self) -> dict[str, str]:
        return {"where": "there"}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {"busy_share": 0.5}


async def hooked() -> Any:
    """Serve's wrapper of a `Hooked`, as it is in a replica."""
    wrapper = replica.UserCallableWrapper(
        Hooked,
        (),
        {},
        deployment_id=ENGINES,
        run_sync_methods_in_threadpool=False,
        run_user_code_in_separate_thread=False,
        local_testing_mode=False,
        deployment_config=replica.DeploymentConfig(),
        actor_id="a",
    )
    await wrapper.initialize_callable()
    return wrapper


@contract("record_replica_metadata")
def _() -> None:
    async def scenario() -> None:
        wrapper = await hooked()
        assert wrapper.has_user_replica_metadata_method
        assert await _result(wrapper.call_user_record_replica_metadata()) == {"where": "there"}

    asyncio.run(scenario())


@contract("record_autoscaling_stats")
def _() -> None:
    async def scenario() -> None:
        assert await _result((await hooked()).call_record_autoscaling_stats()) == {"busy_share": 0.5}

    asyncio.run(scenario())


@contract("__serve_build_asgi_app__")
def _() -> None:
    _is(replica.SERVE_BUILD_ASGI_APP_METHOD, "__serve_build_asgi_app__")
    from ray import serve

    class Late:
        async def __serve_build_asgi_app__(self) -> Any: ...

    serve.ingress()(Late)  # raises where a class without an application is refused


# --- inside a replica's process -------------------------------------------------------------------------


@contract("global_worker.actors[...]._replica_impl._shutting_down")
def _() -> None:
    assert isinstance(global_worker.actors, dict)
    assert "_replica_impl" in replica.ReplicaActor.__init__.__code__.co_names
    assert "_shutting_down" in replica.Replica.__init__.__code__.co_names
    assert "_shutting_down" in replica.Replica._perform_graceful_shutdown.__code__.co_names
    assert not ray_internals.serve_is_stopping()
    actor = SimpleNamespace(_replica_impl=SimpleNamespace(_shutting_down=True))
    global_worker.actors["stopping"] = actor
    try:
        assert ray_internals.serve_is_stopping()
    finally:
        del global_worker.actors["stopping"]


@contract("ray.serve.context._set_request_context")
def _() -> None:
    def named() -> str:
        ray_internals.request_namer()("a-name")
        return str(context._get_serve_request_context().request_id)

    _is(contextvars.copy_context().run(named), "a-name")


@contract("ray.serve._private.replica.add_port_to_grpc_server")
def _() -> None:
    code = replica.Replica._on_initialized.__code__
    assert "add_port_to_grpc_server" in code.co_names, "Serve does not call it"
    assert "[::]:0" in code.co_consts, "Serve asks for another address"
    assert list(inspect.signature(replica.add_port_to_grpc_server).parameters) == ["server", "address"]
    for node, expected in (("127.0.0.1", "127.0.0.1:0"), ("::1", "[::1]:0"), ("192.0.2.1", "[::]:0")):
        server = Mock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray, "is_initialized", lambda: True)
            patch.setattr("ray.util.get_node_ip_address", lambda node=node: node)
            patch.setattr(replica, "add_port_to_grpc_server", replica.add_port_to_grpc_server)  # to be put back
            ray_internals.keep_calls_on_this_machine()
            replica.add_port_to_grpc_server(server, "[::]:0")
        server.add_insecure_port.assert_called_once_with(expected)


# --- Serve's controller ---------------------------------------------------------------------------------


@contract("ray.serve._private.constants.SERVE_CONTROLLER_NAME")
def _() -> None:
    assert isinstance(constants.SERVE_CONTROLLER_NAME, str)


@contract("ray.serve._private.constants.SERVE_NAMESPACE")
def _() -> None:
    _is(ray_internals.serve_namespace(), constants.SERVE_NAMESPACE)


@contract("ServeController.get_serve_instance_details")
def _() -> None:
    assert callable(controller.ServeController.get_serve_instance_details)
    for schema, fields in {
        ServeInstanceDetails: {"applications", "proxy_location", "http_options"},
        ApplicationDetails: {"deployments", "deployed_app_config", "external_scaler_enabled"},
        DeploymentDetails: {"target_num_replicas", "replicas", "deployment_config"},
        ReplicaDetails: {"replica_id", "state", "node_id", "node_ip", "pid"},
    }.items():
        missing = fields - schema.model_fields.keys()
        assert not missing, f"{schema.__name__} has no {sorted(missing)}"


@contract("ServeController.update_deployment_replicas")
def _() -> None:
    method = controller.ServeController.update_deployment_replicas
    assert list(inspect.signature(method).parameters) == ["self", "deployment_id", "target_num_replicas"]


@contract("ray.serve._private.common.DeploymentID")
def _() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.update_deployment_replicas = self
            self.told: tuple[Any, ...] = ()

        async def remote(self, *told: Any) -> None:
            self.told = told

    recorder = Recorder()
    asyncio.run(ray_internals.set_replicas(recorder, "app", "engines", 3))
    assert recorder.told == (ENGINES, 3)


# --- the cluster ----------------------------------------------------------------------------------------


@contract("ray.serve.autoscaling_policy._apply_delay_logic")
def _() -> None:
    """Up after 4 s for which more are desired, down after 6, and no sooner because of what was desired before."""
    delays = SimpleNamespace(upscale_delay_s=4.0, downscale_delay_s=6.0, downscale_to_zero_delay_s=None)
    desired = [3, 3, 5, 2, 3, 3, 3, 3, 4, 2, 1, 1, 1, 1, 1, 1, 1]
    state: dict[str, Any] = {}
    target, targets = 2, []
    for second, number in enumerate(desired):
        target = ray_internals.apply_scaling_delays(number, target, delays, state, float(second))
        targets.append(target)
    assert targets == [2, 2, 2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 4, 1, 1]


@contract("ray.serve._private.api.serve_start")
def _() -> None:
    parameters = inspect.signature(api.serve_start).parameters
    missing = {"http_options", "grpc_options", "proxy_location", "controller_options"} - parameters.keys()
    assert not missing, f"it takes no {sorted(missing)}"


@contract("ServeControllerClient.deploy_apps")
def _() -> None:
    parameters = inspect.signature(client.ServeControllerClient.deploy_apps).parameters
    assert list(parameters)[:3] == ["self", "config", "_blocking"]


@contract("ray._private.parameter.RayParams")
def _() -> None:
    original = parameter.RayParams
    with ray_internals.few_ray_processes(shows_logs=False):
        lean = parameter.RayParams()
        assert (lean.no_monitor, lean.include_log_monitor) == (True, False)
    with ray_internals.few_ray_processes(shows_logs=True):
        assert parameter.RayParams().include_log_monitor
    assert parameter.RayParams is original
    start = inspect.getsource(Node.start_head_processes) + inspect.getsource(Node.start_ray_processes)
    assert "if not self._ray_params.no_monitor:" in start and "if self._ray_params.include_log_monitor:" in start
    assert "ray._private.parameter.RayParams(" in inspect.getsource(worker.init)


@contract("ray._private.services.find_gcs_addresses")
def _() -> None:
    assert list(inspect.signature(services.find_gcs_addresses).parameters) == []
    source = inspect.getsource(services.get_ray_address_from_environment)
    assert "gcs_addrs = find_gcs_addresses()" in source and "next(iter(gcs_addrs))" in source


@contract("ray._private.node.Node.start_api_server")
def _() -> None:
    original = Node.start_api_server
    parameters = inspect.signature(original).parameters
    assert list(parameters) == ["self", "include_dashboard", "raise_on_failure"], f"it takes {list(parameters)}"
    with pytest.MonkeyPatch.context() as environment:
        for usage_statistics, is_left_out in (("0", True), ("1", False)):
            environment.setenv("RAY_USAGE_STATS_ENABLED", usage_statistics)
            with ray_internals.few_ray_processes(shows_logs=False):
                assert (Node.start_api_server is not original) == is_left_out
    assert Node.start_api_server is original


@contract("ray._private.worker._global_node.dead_processes")
def _() -> None:
    assert worker._global_node is None, "a Ray runs in this process"
    assert ray_internals.ended_ray_processes() == []
    parameters = inspect.signature(Node.dead_processes).parameters
    assert list(parameters) == ["self"], f"it takes {list(parameters)}"


@contract("ray._private.state.available_resources_per_node")
def _() -> None:
    assert not inspect.signature(state.available_resources_per_node).parameters
    assert ray_internals.free_resources() == []  # no cluster runs here; tests/e2e/test_redeploy.py asks one


@contract("HEAD_NODE_RESOURCE_NAME")
def _() -> None:
    _is(ray_constants.HEAD_NODE_RESOURCE_NAME, ray_internals.HEAD_NODE_RESOURCE_NAME)
    assert ray_internals.is_head({"CPU": 1.0, ray_constants.HEAD_NODE_RESOURCE_NAME: 1.0})
    assert not ray_internals.is_head({"CPU": 1.0})


@contract("ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree.PrefixTree")
def _() -> None:
    tree = ray_internals.prefix_tree()
    tree.add_tenants(["a"], 0.0)
    tree.insert("text", "a", 1.0)
    assert tree.prefix_match("text")[0] == "text"


def _is(found: object, expected: object) -> None:
    assert found == expected, f"it is {found!r}, not {expected!r}"


async def _result(made: Any) -> Any:
    """The result of what Serve's wrapper returns: a coroutine, or a future of the thread with the user's code."""
    return await made if inspect.isawaitable(made) else await asyncio.wrap_future(made)
