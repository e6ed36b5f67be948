"""What an ingress's parts ask the hub at the same time is one call, and each gets its own answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.hub.calls import HubCalls
from deployments.hub.deployment import MetricsHub
from deployments.ingress.roll_call import PERIOD_S, RollCall
from deployments.telemetry.metrics_push import MetricsPusher
from monitoring.metrics import Metrics
from tests.deployments.support.hub_handle import HubHandle
from tests.deployments.support.virtual_time import run


class Counted(MetricsHub):
    """A hub that counts what comes through Serve."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    async def together(self, calls: Any) -> list[Any]:
        self.num_calls += 1
        return await super().together(calls)


def test_parts_that_call_every_second_cost_one_call_a_second() -> None:
    async def scenario() -> None:
        hub = Counted()
        calls = HubCalls(HubHandle(hub))
        numbers: list[int] = []
        parts: list[Any] = [RollCall(calls, "i", numbers.append)]
        parts += [MetricsPusher(calls, name, Metrics(name, "i", "ingress").snapshot) for name in "ab"]
        for part in parts:
            part.start()
        await asyncio.sleep(100 * PERIOD_S)
        for part in parts:
            part.stop()
        assert 90 <= hub.num_calls <= 101
        page = await calls.render.remote()
        assert 'raydix_metrics_processes{model_name="",replica="hub"} 1.0' in page[0].decode()
        assert [part.num_failed for part in parts[1:]] == [0, 0]

    run(scenario())


def test_each_call_has_its_own_answer_and_its_own_error() -> None:
    async def scenario() -> None:
        calls = HubCalls(HubHandle(Counted()))
        asked = (calls.keep.remote("i", None), calls.push.remote("p", 5), calls.here.remote("i"))
        answers: Any = await asyncio.gather(*asked, return_exceptions=True)
        assert answers[0] == (False, None)
        assert isinstance(answers[1], TypeError)
        assert answers[2] is None  # the hub is too new to know how many are here

    asyncio.run(scenario())


def test_without_a_hub_all_calls_fail_and_the_next_ones_are_sent_anew() -> None:
    async def scenario() -> None:
        handle = HubHandle(None)
        calls = HubCalls(handle)
        failed = await asyncio.gather(calls.here.remote("i"), calls.here.remote("j"), return_exceptions=True)
        assert [type(error) for error in failed] == [ConnectionError, ConnectionError]
        handle.hangs = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await calls.here.remote("i")
        handle.hangs, handle.hub = False, Counted()
        await calls.leave.remote("i")

    run(scenario())
