"""Several ingresses with one store: what one has made, the others read, continue, cancel and delete."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.api import create_app
from deployments.api.responses import record, stored
from deployments.api.responses.kept import KeptResponses
from deployments.api.routes import responses as routes
from deployments.config.settings import ResponseSettings
from tests.deployments.api.responses.conftest import ASK, RESPONSES, Responses
from tests.deployments.api.responses.support.redis_server import redis_server

Make = Callable[..., Responses]
Scene = Callable[[httpx.AsyncClient, httpx.AsyncClient], Awaitable[None]]
LATER: dict[str, Any] = ASK | {"background": True}


@pytest.fixture(params=["directory", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a store that can be shared."""
    if request.param == "directory":
        yield f"file://{tmp_path}/with%20space"
        assert (tmp_path / "with space").is_dir()
    else:
        with redis_server() as url:
            yield url


@pytest.fixture
def pair(ask: Make, store: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Play a scene with the clients of two ingresses that share a store; with `hangs`, no answer ends."""
    monkeypatch.setattr(record, "BEAT_S", 0.01)
    monkeypatch.setattr(routes, "LOOK_S", 0.01)
    it = ask()
    settings = ResponseSettings(store=store)

    def play(scene: Scene, *, hangs: bool = False) -> None:
        it.engine.hangs = hangs

        async def run() -> None:
            services = [replace(it.talk.service, responses=KeptResponses(settings)) for _ in range(2)]
            clients = [
                httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service)), base_url="http://test")
                for service in services
            ]
            await scene(*clients)
            for service, client in zip(services, clients, strict=True):
                await service.responses.aclose()
                await client.aclose()

        asyncio.run(run())

    return play


async def until(http: httpx.AsyncClient, name: str, *statuses: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            response: dict[str, Any] = (await http.get(f"{RESPONSES}/{name}")).json()
            if response["status"] in statuses:
                return response
            await asyncio.sleep(0.005)


def test_a_response_is_read_continued_and_deleted_at_another_ingress(pair: Any) -> None:
    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        made = (await here.post(RESPONSES, json=ASK)).json()
        path = f"{RESPONSES}/{made['id']}"
        assert (await there.get(path)).json() == made
        again = (await there.post(RESPONSES, json=ASK | {"previous_response_id": made["id"]})).json()
        items = (await here.get(f"{RESPONSES}/{again['id']}/input_items")).json()
        assert len(items["data"]) == 3
        assert (await there.delete(path)).json()["deleted"]
        assert (await here.get(path)).status_code == 404

    pair(scene)


def test_a_background_response_is_followed_at_another_ingress(pair: Any) -> None:
    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        begun = (await here.post(RESPONSES, json=LATER | {"stream": False})).json()
        done = await until(there, begun["id"], "completed")
        assert done == (await here.get(f"{RESPONSES}/{begun['id']}")).json()

    pair(scene)


def test_a_background_response_is_cancelled_at_another_ingress(pair: Any) -> None:
    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        begun = (await here.post(RESPONSES, json=LATER)).json()
        path = f"{RESPONSES}/{begun['id']}"
        running = await until(there, begun["id"], "in_progress")
        refused = await there.get(path, params={"stream": "true"})
        assert refused.status_code == 400 and "another ingress" in refused.json()["error"]["message"]
        refused = await there.post(RESPONSES, json=ASK | {"previous_response_id": running["id"]})
        assert refused.status_code == 400 and "still being generated" in refused.json()["error"]["message"]
        cancelled = (await there.post(f"{path}/cancel")).json()
        assert cancelled["status"] == "cancelled" and cancelled["output"]
        assert (await here.get(path)).json() == cancelled == (await there.get(path)).json()

    pair(scene, hangs=True)


def test_a_background_response_is_deleted_at_another_ingress(pair: Any) -> None:
    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        begun = (await here.post(RESPONSES, json=LATER)).json()
        path = f"{RESPONSES}/{begun['id']}"
        await until(there, begun["id"], "in_progress")
        assert (await there.delete(path)).json()["deleted"]
        async with asyncio.timeout(60):
            while (await here.get(path)).status_code != 404:
                await asyncio.sleep(0.005)
        assert (await there.get(path)).status_code == 404

    pair(scene, hangs=True)


def test_a_response_that_is_written_while_it_is_deleted_elsewhere_is_deleted(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, is_held, is_deleted = record.ResponseKeeper.try_keep, asyncio.Event(), asyncio.Event()

    async def keep_late(keeper: record.ResponseKeeper, events: bytes = b"") -> bool:
        is_held.set()
        await is_deleted.wait()
        return await keep(keeper, events)

    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        begun = (await here.post(RESPONSES, json=LATER)).json()
        path = f"{RESPONSES}/{begun['id']}"
        await until(there, begun["id"], "in_progress")
        monkeypatch.setattr(record.ResponseKeeper, "try_keep", keep_late)
        await is_held.wait()
        assert (await there.delete(path)).json()["deleted"]
        is_deleted.set()
        async with asyncio.timeout(60):
            while (await here.get(path)).status_code != 404:
                await asyncio.sleep(0.005)

    pair(scene, hangs=True)


def test_a_background_response_whose_ingress_died_has_failed(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        begun = (await here.post(RESPONSES, json=LATER)).json()
        await until(there, begun["id"], "in_progress")
        monkeypatch.setattr(stored, "LOST_AFTER_S", -1.0)  # nothing that it tells is new enough
        lost = (await there.get(f"{RESPONSES}/{begun['id']}")).json()
        assert lost["status"] == "failed" and "ingress" in lost["error"]["message"]
        again = (await there.post(f"{RESPONSES}/{begun['id']}/cancel")).json()
        assert again["status"] == "failed"

    pair(scene, hangs=True)


@pytest.mark.parametrize("given", ["disk", "file:relative", "file://host/path", "redis://", "http://secret@x"])
def test_a_store_that_is_not_known_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"file:///var") as refused:
        ResponseSettings(store=given)
    assert "store must" in str(refused.value)
