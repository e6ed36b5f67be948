"""Loading and unloading through the controller's target: idempotent, reported correctly, refused with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from deployments.client.protocol import ModelState, NotSwitchable, Unavailable
from deployments.control.controller_client import (
    AppView,
    ControllerClient,
    ControllerUnavailable,
    DeploymentView,
    ReplicaView,
)
from deployments.control.model_switch import DeploymentSwitch, state_of
from router.ray_internals import instance_details


def deployment(target: int, states: Iterable[str]) -> DeploymentView:
    return DeploymentView(target, tuple(ReplicaView(f"r{i}", state) for i, state in enumerate(states)))


class Controller:
    """A controller that keeps a target and has the replicas that the test sets."""

    def __init__(self, target: int, *states: str, is_scalable: bool = True) -> None:
        self.target, self.states, self.is_scalable = target, states, is_scalable
        self.orders: list[tuple[str, int]] = []
        self.is_silent = False
        self.others: dict[str, DeploymentView] = {}

    async def view(self) -> AppView:
        if self.is_silent:
            raise ControllerUnavailable("it has not answered")
        return AppView({"E": deployment(self.target, self.states), **self.others}, self.is_scalable)

    async def scale(self, name: str, count: int) -> None:
        self.orders.append((name, count))
        if name in self.others:
            self.others[name] = deployment(count, ())
        else:
            self.target = count


@pytest.mark.parametrize(
    "target, states, state",
    [
        (0, [], "unloaded"),
        (0, ["STOPPING"], "draining"),
        (0, ["RUNNING", "STOPPING"], "draining"),
        (2, [], "loading"),
        (2, ["STARTING", "STOPPING"], "loading"),
        (2, ["RUNNING", "STARTING"], "loaded"),
    ],
)
def test_the_state_follows_target_and_replicas(target: int, states: list[str], state: ModelState) -> None:
    assert state_of(deployment(target, states)) == state


def test_repeated_calls_change_the_target_once() -> None:
    controller = Controller(3, "RUNNING", "RUNNING", "RUNNING")
    switch = DeploymentSwitch(controller, {"E": 2})

    async def scenario() -> None:
        assert await switch.load() == "loaded"  # keeps as many as it was scaled to
        assert await switch.unload() == await switch.unload() == "draining"
        controller.states = ()
        assert await switch.state() == "unloaded"
        assert await switch.load() == await switch.load() == "loading"
        assert controller.orders == [("E", 0), ("E", 2)]

    asyncio.run(scenario())


def test_all_deployments_of_a_model_are_loaded_and_unloaded_together() -> None:
    """Roles make several. While one of them has no replica yet, the model is served by the other."""
    controller = Controller(2, "RUNNING")
    controller.others["D"] = deployment(3, ())
    switch = DeploymentSwitch(controller, {"E": 2, "D": 3})

    async def scenario() -> None:
        assert await switch.state() == "loaded"
        assert await switch.unload() == "draining"
        controller.states = ()
        assert await switch.state() == "unloaded"
        controller.target = 1  # as if loading had been cut off in its midst
        assert await switch.load() == "loading"
        assert controller.orders == [("E", 0), ("D", 0), ("D", 3)]

    asyncio.run(scenario())


def test_an_application_that_serve_may_not_scale_gives_an_error_that_names_the_setting() -> None:
    controller = Controller(1, "RUNNING", is_scalable=False)
    switch = DeploymentSwitch(controller, {"E": 1})
    assert asyncio.run(switch.load()) == "loaded"  # it is already
    with pytest.raises(NotSwitchable, match="external_scaler_enabled: true"):
        asyncio.run(switch.unload())
    assert controller.orders == []


def test_a_silent_controller_leaves_the_state_unknown_and_refuses_changes() -> None:
    controller = Controller(1, "RUNNING")
    controller.is_silent = True
    switch = DeploymentSwitch(controller, {"E": 1})
    assert asyncio.run(switch.state()) is None
    with pytest.raises(Unavailable, match="it has not answered"):
        asyncio.run(switch.load())


def test_the_controller_is_asked_once_for_many_and_again_after_scaling() -> None:
    calls: list[object] = []
    details = {"target_num_replicas": 1, "replicas": [{"replica_id": "r", "state": "RUNNING", "node_id": "n"}]}

    class Scripted(ControllerClient):
        async def _call(self, method: object) -> Any:
            calls.append(method)
            await asyncio.sleep(0)
            application = {"deployments": {"E": details}, "external_scaler_enabled": True}
            return {"applications": {"app": application}}

    async def scenario() -> None:
        control = Scripted("app", timeout_s=1, max_age_s=1000)
        views = await asyncio.gather(*(control.view() for _ in range(10)))
        assert all(view is views[0] for view in views)
        assert views[0].is_scalable and views[0].deployments["E"].replicas == (ReplicaView("r", "RUNNING", "n"),)
        await control.view()
        assert calls == [instance_details]
        details["target_num_replicas"] = 0
        await control.scale("E", 0)
        assert (await control.view()).deployments["E"].target == 0
        assert len(calls) == 3

    asyncio.run(scenario())


def test_an_application_that_serve_does_not_know_is_unavailable() -> None:
    class Scripted(ControllerClient):
        async def _call(self, method: object) -> Any:
            return {"applications": {}}

    with pytest.raises(ControllerUnavailable, match="no application 'app'"):
        asyncio.run(Scripted("app", 1).view())


def test_loading_starts_as_many_replicas_as_the_deployed_config_says() -> None:
    """Which may have changed since this process was given a number."""

    async def scenario() -> None:
        controller = Controller(0)
        controller.others["F"] = DeploymentView(0, (), configured=5)
        await DeploymentSwitch(controller, {"E": 2, "F": 1}).load()
        assert controller.orders == [("E", 2), ("F", 5)]

    asyncio.run(scenario())


def test_the_targets_are_those_that_serve_works_towards() -> None:
    async def scenario() -> None:
        controller = Controller(3, "RUNNING")
        switch = DeploymentSwitch(controller, {"E": 1})
        assert await switch.targets() == {"E": 3}
        controller.is_silent = True
        assert await switch.targets() is None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("config", "configured"),
    [
        ({"num_replicas": 4}, 4),
        ({"num_replicas": 1, "autoscaling_config": {"max_replicas": 3}}, None),
        ({"num_replicas": "auto"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_a_fixed_number_is_read_from_the_deployed_config(config: Any, configured: int | None) -> None:
    deployment = {"target_num_replicas": 0, "replicas": [], "deployment_config": config}
    view = AppView.from_details({"deployments": {"E": deployment}})
    assert view.deployments["E"].configured == configured
