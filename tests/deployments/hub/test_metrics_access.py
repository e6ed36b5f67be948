"""The two ways to the metrics page: through an ingress, which keeps its checkpoint, and on the hub's own port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.cli.errors import UserError
from deployments.cli.serve_config import Overrides, check_metrics_ports, load
from deployments.client.protocol import Unavailable
from deployments.config.settings import MetricsSettings
from deployments.hub.calls import HubCalls
from deployments.hub.deployment import MetricsHub
from deployments.hub.keeper import MetricsKeeper
from deployments.hub.server import MetricsPortError, MetricsServer, listen
from deployments.telemetry.metrics_push import MetricsPusher
from monitoring.metrics import Metrics
from tests.deployments.support.hub_handle import HubHandle
from tests.deployments.support.time_limit import run_scenario


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def page_of(keeper: MetricsKeeper) -> str:
    """Wait for the page and return it."""
    while True:
        try:
            return (await keeper.read_page())[0].decode()
        except Unavailable:
            await asyncio.sleep(0.01)


def tokens(page: str) -> float:
    lines = [line for line in page.splitlines() if line.startswith("raydix_generation_tokens_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_an_ingress_carries_the_totals_over_the_death_of_the_hub() -> None:
    async def scenario() -> None:
        handle, engine, ended = HubHandle(MetricsHub(1)), *(Metrics("demo", r, "engine") for r in ("r1", "r2"))
        calls = HubCalls(handle)
        keeper, pusher = MetricsKeeper(calls, "i"), MetricsPusher(calls, "r1", engine.snapshot)
        engine.inc("generation_tokens_total", 5)
        ended.inc("generation_tokens_total", 7)
        assert handle.hub is not None
        await handle.hub.push("r2", ended.snapshot())
        keeper.start()
        pusher.start()
        while tokens(await page_of(keeper)) < 12:
            await asyncio.sleep(0.01)
        handle.hub = None
        with pytest.raises(Unavailable, match=r"does not answer \(ConnectionError\)"):
            await keeper.read_page()
        handle.hub = MetricsHub(1)
        with pytest.raises(Unavailable, match="still collects earlier counts"):
            await keeper.read_page()
        assert tokens(await page_of(keeper)) == 12
        keeper.stop()
        pusher.stop()

    run_scenario(scenario())


def test_a_hub_that_takes_too_long_is_reported() -> None:
    async def scenario() -> None:
        class Slow(MetricsHub):
            async def render(self) -> None:
                await asyncio.sleep(60)

        with pytest.raises(Unavailable, match="does not answer in time"):
            await MetricsKeeper(HubHandle(Slow()), "i", timeout_s=0.01).read_page()

    run_scenario(scenario())


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_hub_answers_on_a_port_of_its_own() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        hub = MetricsHub(0, MetricsSettings(port=port))
        await hub.record_replica_metadata()
        assert hub.server is not None
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            answer = await client.get("/metrics")
            assert answer.status_code == 200 and "raydix_metrics_processes" in answer.text
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert (await client.get("/v1/models")).status_code == 404
        await hub.server.stop()

    run_scenario(scenario())


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\nhost: x\r\n"])
def test_a_client_that_connects_and_sends_no_request_is_disconnected(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.hub.server.HEADER_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        server = MetricsServer(listen("127.0.0.1", 0), unasked)
        server.start()
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(said)
        await reader.read()  # to the end
        writer.close()
        await server.stop()

    run_scenario(scenario())


def test_only_so_many_are_connected_to_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.hub.server.MAX_CONNECTIONS", 4)

    async def scenario() -> None:
        server = MetricsServer(listen("127.0.0.1", 0), unasked)
        server.start()
        silent = [await asyncio.open_connection(*server.address) for _ in range(4)]
        async with httpx.AsyncClient(timeout=30) as client:
            host, port = server.address
            answer = await client.get(f"http://{host}:{port}/metrics")
        assert answer.status_code == 503
        for _, writer in silent:
            writer.close()
        await server.stop()

    run_scenario(scenario())


async def unasked() -> tuple[bytes, str]:
    raise AssertionError("nobody asked")


def test_a_new_hub_answers_on_its_port_that_it_is_not_ready() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        hub = MetricsHub(1, MetricsSettings(port=port))
        await hub.record_replica_metadata()
        assert hub.server is not None
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://127.0.0.1:{port}/metrics", timeout=30)
        assert answer.status_code == 503 and "try again in a few seconds" in answer.text
        await hub.server.stop()

    run_scenario(scenario())


def test_a_port_in_use_is_named_with_its_setting_and_the_remedy(taken_port: int) -> None:
    with pytest.raises(MetricsPortError) as raised:
        MetricsHub(0, MetricsSettings(port=taken_port, port_wait_s=0.25))
    message = str(raised.value)
    waited = "address already in use, for 0.25 s (metrics.port_wait_s)"
    for part in (f"127.0.0.1:{taken_port}", waited, "set metrics.port", "metrics.host"):
        assert part in message
    with pytest.raises(MetricsPortError, match=r"no-such-host\.invalid:9100"):
        listen("no-such-host.invalid", 9100)


def test_raydix_serve_reports_a_taken_port_before_it_starts_ray(taken_port: int, tmp_path: Path) -> None:
    path = tmp_path / "app.yaml"
    app = {"name": "llm", "import_path": "deployments.app:build", "args": {"metrics": {"port": taken_port}}}
    path.write_text(yaml.safe_dump({"applications": [app]}))
    config = load(path, Overrides(None, None, None, None))
    with pytest.raises(UserError, match=f"cannot serve metrics on 127.0.0.1:{taken_port} .*metrics.port"):
        check_metrics_ports(config)


def test_a_mirror_that_breaks_does_not_keep_numbers_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        handle, engine, asked = HubHandle(MetricsHub()), Metrics("demo", "r1", "engine"), 0

        def broken(self: object, snapshot: bytes) -> None:
            nonlocal asked
            asked += 1
            raise RuntimeError("Ray takes nothing")

        engine.inc("generation_tokens_total", 5)
        calls = HubCalls(handle)
        monkeypatch.setattr("monitoring.ray_mirror.RayMirror.report", broken)
        keeper = MetricsKeeper(calls, "i")
        pusher = MetricsPusher(calls, "r1", engine.snapshot, mirror_to_ray=True)
        pusher.start()
        while tokens(await page_of(keeper)) < 5:
            await asyncio.sleep(0.01)
        pusher.stop()
        assert asked == 1 and pusher.num_failed == 0

    run_scenario(scenario())
