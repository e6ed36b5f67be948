"""What an ingress's parts ask the hub at the same time is one call, and each gets its own answer."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from cache import Namespace
from deployments.hub.calls import IDLE_PERIOD_S, PERIOD_S, HubCalls
from deployments.hub.deployment import MetricsHub
from deployments.hub.keeper import MetricsKeeper
from deployments.hub.roster import ABSENT_S
from deployments.hub.warm_up_board import PrefixReport
from deployments.ingress.prefix_reporter import PrefixReporter
from deployments.ingress.roll_call import RollCall
from deployments.telemetry.metrics_push import MetricsPusher
from monitoring.metrics import Metrics
from router.fetch.hot_prefixes import HotPrefix
from tests.deployments.support.hub_handle import HubHandle
from tests.deployments.support.virtual_time import run


class Counted(MetricsHub):
    """A hub that counts what comes through Serve."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = self.num_reports = 0

    async def together(self, calls: Any) -> list[Any]:
        self.num_calls += 1
        self.num_reports += sum(method == "report_prefixes" for method, _ in calls)
        return await super().together(calls)


def parts_of_an_ingress(calls: HubCalls) -> list[Any]:
    numbers: list[int] = []
    prefixes = [PrefixReport("m", 16, 600.0, [HotPrefix(Namespace("m"), array("i", range(16)), ((16, 2.0),))])]
    pushers = [MetricsPusher(calls, name, Metrics(name, "i", "ingress").snapshot) for name in "ab"]
    roll_call, keeper = RollCall(calls, "i", numbers.append), MetricsKeeper(calls, "i")
    return [*pushers, roll_call, keeper, PrefixReporter(calls, "i", lambda: prefixes, 5.0)]


def test_all_parts_together_cost_one_call_a_second() -> None:
    async def scenario() -> None:
        hub = Counted()
        calls = HubCalls(HubHandle(hub))
        parts = parts_of_an_ingress(calls)
        for part in parts:
            part.start()
        await asyncio.sleep(100 * PERIOD_S)
        for part in parts:
            part.stop()
        assert 90 <= hub.num_calls <= 101
        page = await calls.render.remote()
        assert 'raydix_metrics_processes{model_name="",replica="hub"} 1.0' in page[0].decode()
        assert [part.num_failed for part in parts[:2]] == [0, 0]
        assert 14 <= hub.num_reports <= 20

    run(scenario())


def test_an_idle_process_calls_half_as_often_and_once_it_has_work_within_a_second() -> None:
    async def scenario() -> None:
        hub, is_idle = Counted(), True
        calls = HubCalls(HubHandle(hub), lambda: is_idle)
        parts = parts_of_an_ingress(calls)
        for part in parts:
            part.start()
        await asyncio.sleep(100 * PERIOD_S)
        num_idle = hub.num_calls
        assert 45 <= num_idle <= 51
        is_idle = False
        await asyncio.sleep(2 * PERIOD_S)
        assert hub.num_calls >= num_idle + 1
        await asyncio.sleep(98 * PERIOD_S)
        assert 95 <= hub.num_calls - num_idle <= 101
        for part in parts:
            part.stop()

    run(scenario())


def test_an_idle_ingress_counts_as_here_even_if_one_call_is_lost() -> None:
    assert 2 * IDLE_PERIOD_S < ABSENT_S


def test_each_call_has_its_own_answer_and_its_own_error() -> None:
    async def scenario() -> None:
        calls = HubCalls(HubHandle(Counted()))
        asked = (calls.keep.remote("i", None), calls.push.remote("p", 5), calls.here.remote("i"))
        answers: Any = await asyncio.gather(*asked, return_exceptions=True)
        assert answers[0] == (False, None)
        assert isinstance(answers[1], TypeError)
        assert answers[2] is None  # the hub is too new to know how many are here

    asyncio.run(scenario())


def test_without_a_hub_all_calls_fail_and_later_ones_are_sent_again() -> None:
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
