"""The metrics hub's own HTTP server."""

from __future__ import annotations

import asyncio
import logging
import socket
from logging.handlers import MemoryHandler

import pytest

from deployments.config.settings import MetricsSettings
from deployments.hub.deployment import MetricsHub
from deployments.hub.server import MetricsPortError, MetricsServer, listen


async def no_page() -> tuple[bytes, str]:
    return b"", "text/plain"


def test_the_server_leaves_the_process_s_logging_as_it_is() -> None:
    """Serve's logs go through a handler of this kind, by which a new controller knows the replicas of the last."""
    target = logging.NullHandler()
    handler = MemoryHandler(10, target=target)
    listener = listen("127.0.0.1", 0)
    try:
        MetricsServer(listener, no_page)
        assert handler.target is target
    finally:
        listener.close()
        handler.close()


def held_port() -> socket.socket:
    """A listener as that of a hub that is about to end."""
    return listen("127.0.0.1", 0)


def test_a_hub_waits_for_the_port_that_its_predecessor_still_holds() -> None:
    before = held_port()
    port: int = before.getsockname()[1]
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            before.close()

    listener = listen("127.0.0.1", port, wait_s=30.0, sleep=sleep)
    assert listener.getsockname()[1] == port and len(waits) == 3
    listener.close()


def test_a_port_that_stays_taken_is_an_error_after_a_bounded_time() -> None:
    before = held_port()
    waits: list[float] = []
    with pytest.raises(MetricsPortError, match=r"address already in use.*for 2 s \(metrics\.port_wait_s\)"):
        listen("127.0.0.1", before.getsockname()[1], wait_s=2.0, sleep=waits.append)
    assert sum(waits) == pytest.approx(2.0)
    before.close()


def test_an_address_of_another_machine_is_an_immediate_error() -> None:
    with pytest.raises(MetricsPortError, match=r"metrics\.host"):
        listen("192.0.2.1", 9, wait_s=30.0, sleep=lambda seconds: pytest.fail("it never becomes free"))


def test_a_new_hub_takes_the_port_over(monkeypatch: pytest.MonkeyPatch) -> None:
    before = held_port()
    monkeypatch.setattr("deployments.hub.server.time.sleep", lambda seconds: before.close())
    hub = MetricsHub(0, MetricsSettings(port=before.getsockname()[1]))
    assert hub.server is not None
    asyncio.run(hub.server.stop())
