"""Ingresses divide tenants' limits by their number, which they learn from the real hub, on simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from deployments.admission.rate_limits import RateLimited
from deployments.api.http.access import AccessControl
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from deployments.hub.calls import PERIOD_S, HubCalls
from deployments.hub.deployment import MetricsHub
from deployments.hub.roster import ABSENT_S
from deployments.ingress.roll_call import RollCall
from tests.deployments.support.hub_handle import HubHandle
from tests.deployments.support.virtual_time import now, run

PER_MINUTE = 1200
KEYS = KeyRing((TenantSettings(name="t", key_hashes=(hash_key("k"),), requests_per_minute=PER_MINUTE),))


class OneIngress:
    """The parts of an ingress that limits need."""

    def __init__(self, hub: HubHandle, name: str, configured: int = 1) -> None:
        self.access = AccessControl(KEYS, configured, clock=now)
        self.roll_call = RollCall(HubCalls(hub), name, self.access.divide_limits)

    def allowed(self) -> int:
        """The requests per minute that it allows, as it tells clients."""
        ticket = self.access.start(KEYS.tenants[0])
        return int(ticket.headers()["x-ratelimit-limit-requests"])


@pytest.fixture
def hub() -> Callable[[], MetricsHub]:
    """Makes hubs whose clock is the event loop's."""
    return partial(MetricsHub, clock=now)


async def settled(seconds: float = 2 * PERIOD_S) -> None:
    await asyncio.sleep(seconds)


def test_limits_are_divided_by_the_ingresses_that_are_there(hub: Callable[[], MetricsHub]) -> None:
    async def scenario() -> None:
        handle = HubHandle(hub())
        ingresses = [OneIngress(handle, f"i{number}", configured=2) for number in range(4)]
        first, second, *_ = ingresses
        assert first.allowed() == PER_MINUTE / 2  # nothing known yet: as configured
        first.roll_call.start()
        await settled(ABSENT_S + 2 * PERIOD_S)
        assert first.allowed() == PER_MINUTE
        for ingress in ingresses[1:]:
            ingress.roll_call.start()
        await settled()
        assert [ingress.allowed() for ingress in ingresses] == [PER_MINUTE / 4] * 4
        await second.roll_call.leave()
        await settled()
        assert [ingress.allowed() for ingress in ingresses if ingress is not second] == [PER_MINUTE / 3] * 3
        first.roll_call.stop()
        await settled(ABSENT_S + 2 * PERIOD_S)
        assert [ingress.allowed() for ingress in ingresses[2:]] == [PER_MINUTE / 2] * 2
        for ingress in ingresses[2:]:
            ingress.roll_call.stop()

    run(scenario())


def test_while_the_hub_is_away_and_while_it_is_new_the_last_number_stays(hub: Callable[[], MetricsHub]) -> None:
    async def scenario() -> None:
        handle = HubHandle(hub())
        ingresses = [OneIngress(handle, f"i{number}") for number in range(3)]
        for ingress in ingresses:
            ingress.roll_call.start()
        await settled(ABSENT_S + 2 * PERIOD_S)
        assert ingresses[0].allowed() == PER_MINUTE / 3
        handle.hub = None
        await settled(60.0)
        handle.hub = hub()
        for _ in range(10):
            assert [ingress.allowed() for ingress in ingresses] == [PER_MINUTE / 3] * 3
            await settled(ABSENT_S / 5)
        for ingress in ingresses:
            ingress.roll_call.stop()

    run(scenario())


def test_a_hub_that_does_not_answer_is_asked_again(hub: Callable[[], MetricsHub]) -> None:
    async def scenario() -> None:
        handle = HubHandle(hub())
        handle.hangs = True
        ingress = OneIngress(handle, "i", configured=5)
        ingress.roll_call.start()
        await settled(60.0)
        assert ingress.allowed() == PER_MINUTE / 5
        handle.hangs = False
        await settled(60.0)
        assert ingress.allowed() == PER_MINUTE
        ingress.roll_call.stop()

    run(scenario())


def test_all_ingresses_together_allow_a_tenant_the_configured_limit(hub: Callable[[], MetricsHub]) -> None:
    """Twelve where two are configured: over minutes they allow the limit, and not six times as much."""

    async def scenario() -> None:
        handle = HubHandle(hub())
        ingresses = [OneIngress(handle, f"i{number}", configured=2) for number in range(12)]
        for ingress in ingresses:
            ingress.roll_call.start()
        await settled(ABSENT_S + 2 * PERIOD_S)
        began, num_allowed = now(), 0
        while now() < began + 180:
            for ingress in ingresses:
                num_allowed += _is_allowed(ingress)
            await asyncio.sleep(0.25)
        most = PER_MINUTE * 3 + PER_MINUTE  # and what a minute's bucket held at the beginning
        assert most * 0.98 <= num_allowed <= most
        for ingress in ingresses:
            ingress.roll_call.stop()

    run(scenario())


def _is_allowed(ingress: OneIngress) -> bool:
    try:
        ingress.access.start(KEYS.tenants[0])
    except RateLimited:
        return False
    return True


def test_leaving_without_a_hub_takes_no_time(hub: Callable[[], MetricsHub]) -> None:
    async def scenario() -> None:
        handle: Any = HubHandle(None)
        ingress = OneIngress(handle, "i")
        ingress.roll_call.start()
        await settled()
        before = now()
        await ingress.roll_call.leave()
        assert now() - before <= 2 * PERIOD_S

    run(scenario())
