"""A hub that stood still takes nobody for gone who could not be heard meanwhile. The clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from deployments.hub.deployment import MetricsHub
from deployments.hub.roster import ABSENT_S
from monitoring.hub import GAUGE_TTL_S, GONE_AFTER_S
from monitoring.metrics import Metrics
from tests.deployments.support.virtual_time import run


def with_hub(scenario: Callable[[MetricsHub, Callable[[], None]], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with a hub that is old enough to know everybody, and what has it stand still for an hour."""

    async def played() -> None:
        loop, paused_s = asyncio.get_running_loop(), 0.0

        def stand_still() -> None:
            nonlocal paused_s
            paused_s += 3600.0

        hub = MetricsHub(clock=lambda: loop.time() + paused_s)
        await hub.here("first")
        await asyncio.sleep(ABSENT_S)
        await scenario(hub, stand_still)

    run(played())


def test_ingresses_are_counted_as_before_a_pause() -> None:
    """Otherwise each that is heard first would let its tenants have all of their limits."""

    async def scenario(hub: MetricsHub, stand_still: Callable[[], None]) -> None:
        for name in ("a", "b", "c"):
            await hub.here(name)
        await asyncio.sleep(2.0)
        stand_still()
        assert [await hub.here(name) for name in ("a", "b")] == [3, 3]
        await asyncio.sleep(ABSENT_S + 0.5)
        assert await hub.here("a") == 1  # the others have died: that is noticed as ever

    with_hub(scenario)


def test_metrics_that_processes_reported_are_shown_after_a_pause() -> None:
    async def scenario(hub: MetricsHub, stand_still: Callable[[], None]) -> None:
        engine = Metrics("demo", "r1", "engine")
        engine.inc("generation_tokens_total", 5)
        engine.set("kv_pages", 7, state="free", tier="device")
        await hub.push("r1", engine.snapshot())

        async def lines() -> list[str]:
            page = await hub.render()
            assert page is not None
            return [line for line in page[0].decode().splitlines() if "demo" in line]

        told = await lines()
        assert any("r1" in line for line in told)
        stand_still()
        assert await lines() == told
        await asyncio.sleep(GAUGE_TTL_S)
        assert [line for line in told if line not in await lines()]  # its gauges
        await asyncio.sleep(GONE_AFTER_S)
        assert not any("r1" in line for line in await lines())

    with_hub(scenario)
