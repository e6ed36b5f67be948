"""Ingresses follow the rollouts of the real hub, on simulated time."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from deployments.api.served.versions import Versions
from deployments.client.protocol import RolloutRefused, Unavailable
from deployments.config.versions import RolloutSettings, VersionPlan
from deployments.hub.calls import PERIOD_S, HubCalls
from deployments.hub.deployment import MetricsHub
from deployments.hub.rollouts import LISTEN_S
from deployments.ingress.rollouts import RolloutFollower
from monitoring.metrics import Metrics
from tests.deployments.support.hub_handle import HubHandle
from tests.deployments.support.virtual_time import now, run

SETTINGS = RolloutSettings.model_validate({"steps": [10, 100], "abort_on": {"error_rate": 0.1}})
PLAN = VersionPlan("chat", {"v1": 1.0, "v2": 0.0}, "v2", SETTINGS)
OLD, TENTH = {"v1": 1.0, "v2": 0.0}, {"v1": 0.9, "v2": 0.1}
new_hub = partial(MetricsHub, plans=[PLAN], clock=now)


class OneIngress:
    """The parts of an ingress that versions need."""

    def __init__(self, hub: HubHandle, plan: VersionPlan = PLAN) -> None:
        self.versions = {plan.model: Versions(plan)}
        self.rollouts = RolloutFollower(HubCalls(hub), [plan], self.versions)

    @property
    def weights(self) -> dict[str, float]:
        return {version: round(weight, 9) for version, weight in self.versions["chat"].weights.items()}


async def began(handle: HubHandle) -> list[OneIngress]:
    """Two ingresses after the first step."""
    ingresses = [OneIngress(handle), OneIngress(handle)]
    for ingress in ingresses:
        assert ingress.weights == OLD
        ingress.rollouts.start()
    await asyncio.sleep(LISTEN_S)
    engine = Metrics("chat@v2", "r1", "engine")
    engine.set("engine_up", 1.0)
    await handle.push.remote("r1", engine.snapshot())
    await asyncio.sleep(2 * PERIOD_S)
    assert [ingress.weights for ingress in ingresses] == [TENTH, TENTH]
    return ingresses


def test_all_ingresses_take_each_step_and_each_order() -> None:
    async def scenario() -> None:
        ingresses = await began(HubHandle(new_hub()))
        report = await ingresses[0].rollouts.control("chat", "abort")
        assert report is not None and report["rollout"]["state"] == "aborted"
        assert [ingress.weights for ingress in ingresses] == [OLD, TENTH]
        await asyncio.sleep(2 * PERIOD_S)
        assert [ingress.weights for ingress in ingresses] == [OLD, OLD]
        assert [model["rollout"]["state"] for model in await ingresses[1].rollouts.report()] == ["aborted"]
        with pytest.raises(RolloutRefused):
            await ingresses[1].rollouts.control("chat", "pause")
        assert await ingresses[1].rollouts.control("other", "pause") is None
        for ingress in ingresses:
            ingress.rollouts.stop()

    run(scenario())


def test_the_weights_stay_while_there_is_no_hub_and_with_a_new_one() -> None:
    async def scenario() -> None:
        handle = HubHandle(new_hub())
        ingresses = await began(handle)
        handle.hub = None
        await asyncio.sleep(60.0)
        assert [ingress.weights for ingress in ingresses] == [TENTH, TENTH]
        for call in (ingresses[0].rollouts.report(), ingresses[0].rollouts.control("chat", "abort")):
            with pytest.raises(Unavailable, match="the metrics hub, which controls rollouts, does not answer"):
                await call
        handle.hub = new_hub()
        late = OneIngress(handle)
        for _ in range(20):
            await asyncio.sleep(PERIOD_S)
            assert [ingress.weights for ingress in ingresses] == [TENTH, TENTH]
        await late.rollouts.ask()
        assert late.weights == TENTH
        for ingress in ingresses:
            ingress.rollouts.stop()

    run(scenario())


def test_an_order_outlives_the_hub_that_took_it() -> None:
    async def scenario() -> None:
        handle = HubHandle(new_hub())
        first, second = await began(handle)
        await first.rollouts.control("chat", "abort")
        handle.hub = new_hub()
        await asyncio.sleep(LISTEN_S + 60.0)
        assert first.weights == second.weights == OLD
        for ingress in (first, second):
            ingress.rollouts.stop()

    run(scenario())


def test_a_hub_of_another_configuration_changes_no_weights() -> None:
    async def scenario() -> None:
        handle = HubHandle(new_hub())
        ingresses = await began(handle)
        other = OneIngress(handle, VersionPlan("chat", {"v0": 1.0, "v1": 0.0}, "v1", SETTINGS))
        await other.rollouts.ask()
        assert other.weights == {"v0": 1.0, "v1": 0.0}
        for ingress in ingresses:
            ingress.rollouts.stop()

    run(scenario())
