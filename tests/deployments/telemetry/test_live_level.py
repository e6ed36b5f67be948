"""What a process logs can change while it runs: the hub is told the level, and tells engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.hub.calls import HubCalls
from deployments.hub.deployment import MetricsHub
from deployments.replica.deployment import EngineReplica
from deployments.replica.settings import ReplicaSettings
from deployments.telemetry.live_level import LiveLevel, Reconfigured
from deployments.telemetry.metrics_push import MetricsPusher
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from monitoring.metrics import Metrics
from tests.deployments.support.hub_handle import HubHandle
from tests.deployments.support.in_process_engines import CountingRunner

logger = logging.getLogger("ray.serve")


@pytest.fixture(autouse=True)
def usual_level() -> Iterator[None]:
    before = logger.level
    logger.setLevel("INFO")
    yield
    logger.setLevel(before)


def test_the_level_is_taken_over_and_given_back() -> None:
    level = LiveLevel()
    level.take_over({"logging": {"level": "ERROR"}})
    assert logger.level == logging.ERROR
    level.take_over({})
    assert (logger.level, level.told) == (logging.INFO, None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logging": {"level": "LOUD"}}, r"logging\.level"),
        ({"logging": {"encoding": "json"}}, r"logging\.encoding"),
        ({"limits": {"max_choices": 3}}, r"limits\.max_choices"),
        ({"logging": "ERROR"}, "logging"),
    ],
)
def test_a_wrong_one_ends_a_start_and_no_process_that_runs(
    wrong: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=message):
        Reconfigured(LiveLevel().take_over)(wrong)
    take_over = Reconfigured(LiveLevel().take_over)
    take_over({"logging": {"level": "ERROR"}})
    logger.propagate = True
    take_over(wrong)
    assert logger.level == logging.ERROR
    assert "keeps its current settings" in caplog.text
    assert take_over.is_refused
    take_over({"logging": {"level": "ERROR"}})
    assert not take_over.is_refused


async def refusals(hub: MetricsHub) -> list[float]:
    """Of each process on the hub's page, whether it refuses settings."""
    page = await hub.render()
    assert page is not None
    lines = page[0].decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("raydix_refuses_settings{")]


def test_the_page_shows_which_processes_refuse_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for period in ("PERIOD_S", "IDLE_PERIOD_S"):
        monkeypatch.setattr(f"deployments.hub.calls.{period}", 0.01)

    async def scenario() -> None:
        hub = MetricsHub()
        config = EngineConfig(served_name="m", kv_pages=64, page_size=4, block_tokens=4)
        made = Engine(config, CountingRunner(64))
        handle = HubHandle(hub)
        engine = EngineReplica(config, ReplicaSettings(), handle, lambda _: made, lambda: ("r1", "127.0.0.1"))
        for settings, shown in (({}, 0.0), ({"limits": {"max_choices": 3}}, 1.0), ({}, 0.0)):
            for process in (hub, engine):
                await process.reconfigure(settings)
            if not made.loop.has_started:
                await engine.record_replica_metadata()  # from now on it pushes its metrics
            async with asyncio.timeout(60):
                while await refusals(hub) != [shown, shown]:
                    await asyncio.sleep(0.01)
        engine.close()

    asyncio.run(scenario())


def test_engines_hear_of_the_level_when_they_push_their_metrics() -> None:
    async def scenario() -> None:
        hub = MetricsHub()
        heard: list[str | None] = []
        calls = HubCalls(HubHandle(hub))
        pusher = MetricsPusher(calls, "r1", Metrics("m", "r1", "engine").snapshot, on_level=heard.append)
        pusher.start()
        while not heard:
            await asyncio.sleep(0.01)
        await hub.reconfigure({"logging": {"level": "WARNING"}})
        while heard[-1] is None:
            await asyncio.sleep(0.01)
        pusher.stop()
        assert (heard[0], heard[-1]) == (None, "WARNING")

    asyncio.run(scenario())
