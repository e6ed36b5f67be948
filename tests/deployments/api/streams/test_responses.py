"""Responses in the background move to the ingress at which their stream is read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, create_app
from deployments.api.http.access import AccessControl
from deployments.api.responses import record
from deployments.api.responses.kept import KeptResponses
from deployments.config.settings import ResponseSettings
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from tests.deployments.api.responses.conftest import ASK, RESPONSES, events_of, talk
from tests.deployments.api.streams.conftest import EVENTS
from tests.deployments.support.scripted_api import ScriptedEngine

__all__ = ["talk"]
LATER: dict[str, Any] = ASK | {"background": True, "stream": True}
STREAM = {"stream": "true"}
Scene = Callable[[httpx.AsyncClient, httpx.AsyncClient], Awaitable[None]]


@pytest.fixture(params=["memory", "shared"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, talk: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[ScriptedEngine, Callable[[Scene], None]]:
    """The engine of two ingresses, and a function that plays a scene with their clients."""
    monkeypatch.setattr(record, "BEAT_S", 0.01)
    store = "memory" if request.param == "memory" else f"file://{tmp_path}"
    return pair_of(talk().service, ResponseSettings(store=store))


def pair_of(service: ApiService, settings: ResponseSettings) -> tuple[ScriptedEngine, Callable[[Scene], None]]:
    engine: Any = service.models["demo"].client
    engine.keeps = True

    def play(scene: Scene) -> None:
        async def run() -> None:
            services = [replace(service, responses=KeptResponses(settings)) for _ in range(2)]
            clients = [
                httpx.AsyncClient(transport=httpx.ASGITransport(create_app(each)), base_url="http://test")
                for each in services
            ]
            async with asyncio.timeout(60):
                await scene(*clients)
            for each, client in zip(services, clients, strict=True):
                await each.responses.aclose()
                assert each.responses.background.num_running == 0
                await client.aclose()

        asyncio.run(run())

    return engine, play


async def begun(http: httpx.AsyncClient, engine: ScriptedEngine) -> tuple[str, asyncio.Task[httpx.Response]]:
    """Begin a response whose engine hangs after its text; return its name, and its stream while it is read."""
    engine.hangs = True
    engine.generations.clear()
    reading = asyncio.create_task(http.post(RESPONSES, json=LATER))
    while not engine.generations or engine.generations[-1].events:
        await asyncio.sleep(0)
    (name,) = engine.found
    engine.hangs = False
    return name, reading


def test_a_response_moves_to_the_ingress_at_which_its_stream_is_read(pair: Any) -> None:
    engine, play = pair

    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        name, reading = await begun(here, engine)
        moved = await there.get(f"{RESPONSES}/{name}", params=STREAM)
        assert moved.status_code == 200, moved.text
        assert len(engine.requests) == len(engine.adopted) == 1
        events = events_of(moved.text)
        assert [events[0]["type"], events[-1]["type"]] == ["response.created", "response.completed"]
        first = events_of((await reading).text)
        assert first[-1]["type"] == "error" and first[-1]["code"] == "taken_over"
        assert first[:-1] == events[: len(first) - 1]
        done = (await there.get(f"{RESPONSES}/{name}")).json()
        assert done == events[-1]["response"] and done["status"] == "completed"
        again = await there.get(f"{RESPONSES}/{name}", params=STREAM | {"starting_after": "5"})
        assert moved.text.endswith(again.text) and again.text.count("event: ") == len(events) - 6
        elsewhere = await here.get(f"{RESPONSES}/{name}")
        assert elsewhere.status_code == 404 or elsewhere.json() == done

    play(scene)


def test_a_moved_stream_is_continued_after_every_event(pair: Any) -> None:
    engine, play = pair

    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        for chunk in (1, 7):
            engine.chunk = 1
            name, reading = await begun(here, engine)
            engine.chunk = chunk
            whole = events_of((await there.get(f"{RESPONSES}/{name}", params=STREAM)).text)
            await reading
            engine.found.clear()
            for after in range(0, len(whole), 4):
                engine.chunk = 1
                name, reading = await begun(here, engine)
                engine.chunk = chunk
                rest = await there.get(f"{RESPONSES}/{name}", params=STREAM | {"starting_after": str(after)})
                await reading
                engine.found.clear()
                kinds = [line for line in rest.text.splitlines() if line.startswith("event: ")]
                assert kinds == [f"event: {event['type']}" for event in whole[after + 1 :]]
                assert f'"sequence_number":{after + 1},' in rest.text or after == len(whole) - 1

    play(scene)


def test_it_moves_back(pair: Any) -> None:
    engine, play = pair

    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        name, first = await begun(here, engine)
        engine.hangs = True
        second = asyncio.create_task(there.get(f"{RESPONSES}/{name}", params=STREAM))
        while len(engine.generations) < 2 or engine.generations[-1].events:
            await asyncio.sleep(0)
        assert "taken_over" in (await first).text
        engine.hangs = False
        third = await here.get(f"{RESPONSES}/{name}", params=STREAM)
        assert "taken_over" in (await second).text
        assert events_of(third.text)[-1]["type"] == "response.completed"
        assert (await here.get(f"{RESPONSES}/{name}")).json()["status"] == "completed"

    play(scene)


def test_a_response_whose_ingress_stopped_is_continued_elsewhere(tmp_path: Path, talk: Any) -> None:
    service, settings = talk().service, ResponseSettings(store=f"file://{tmp_path}")
    engine: Any = service.models["demo"].client
    engine.keeps = True

    async def run() -> None:
        kept = KeptResponses(settings)
        here, there = (
            httpx.AsyncClient(
                transport=httpx.ASGITransport(create_app(replace(service, responses=each))), base_url="http://test"
            )
            for each in (kept, KeptResponses(settings))
        )
        name, reading = await begun(here, engine)
        await kept.aclose()
        assert [(it.detached, it.closed) for it in engine.generations] == [(True, False)]
        last = events_of((await reading).text)[-1]
        assert (last["type"], last["code"]) == ("error", "server_stopped")
        assert (await there.get(f"{RESPONSES}/{name}")).json()["status"] in ("queued", "in_progress")
        moved = await there.get(
            f"{RESPONSES}/{name}", params=STREAM | {"starting_after": str(last["sequence_number"] - 1)}
        )
        assert "response.completed" in moved.text and f'"sequence_number":{last["sequence_number"]},' in moved.text
        assert (await there.get(f"{RESPONSES}/{name}")).json()["status"] == "completed"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_cancelled_response_is_not_generated_without_a_reader(pair: Any) -> None:
    engine, play = pair

    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        name, reading = await begun(here, engine)
        assert (await here.post(f"{RESPONSES}/{name}/cancel")).json()["status"] == "cancelled"
        await reading
        assert [(it.detached, it.closed) for it in engine.generations] == [(False, True)]

    play(scene)


def test_a_response_in_the_background_is_continued_by_its_events_ids(pair: Any) -> None:
    _, play = pair

    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        whole = await here.post(RESPONSES, json=LATER, headers=EVENTS)
        events = whole.text.split("\n\n")[:-1]
        ids = [event.partition("\n")[0].removeprefix("id: ") for event in events]
        assert len(set(ids)) == len(ids)
        for at, last in list(enumerate(ids, 1))[::5]:
            headers = {"last-event-id": last}
            path = f"/v1/streams/{last.partition(':')[0]}"
            for client in (here, there):  # `here` has stored it, and `there` adopts it the first time
                for rest in (
                    await client.get(path, headers=headers),
                    await client.post(RESPONSES, json=LATER, headers=headers),
                ):
                    assert rest.status_code == 200, rest.text
                    assert without_times(rest.text.split("\n\n")[:-1]) == without_times(events[at:])
        wrong = await here.post(RESPONSES, json=LATER, headers={"last-event-id": ids[3][:-1] + "x"})
        assert wrong.status_code == 400
        other = ids[3][:-1] + ("0" if ids[3][-1] != "0" else "1")
        wrong = await here.post(RESPONSES, json=LATER, headers={"last-event-id": other})
        assert wrong.status_code == 409

    play(scene)


def without_times(events: list[str]) -> list[str]:
    return [re.sub(r'"completed_at":\d+', "", event) for event in events]


def test_a_response_of_another_tenant_does_not_move(talk: Any) -> None:
    settings = [TenantSettings(name=name, key_hashes=(hash_key(name),)) for name in ("a", "b")]
    it = talk()
    access = AccessControl(KeyRing(settings))
    engine, play = pair_of(replace(it.service, access=access), ResponseSettings())

    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        here.headers["authorization"] = "Bearer a"
        there.headers["authorization"] = "Bearer b"
        name, reading = await begun(here, engine)
        assert (await there.get(f"{RESPONSES}/{name}", params=STREAM)).status_code == 404
        assert not engine.adopted
        there.headers["authorization"] = "Bearer a"
        assert (await there.get(f"{RESPONSES}/{name}", params=STREAM)).status_code == 200
        await reading

    play(scene)


def test_a_conversation_has_a_response_once_although_it_is_continued(pair: Any) -> None:
    _, play = pair

    async def scene(here: httpx.AsyncClient, there: httpx.AsyncClient) -> None:
        talk = (await here.post("/v1/conversations", json={})).json()["id"]
        body = ASK | {"stream": True, "conversation": talk}
        whole = (await here.post(RESPONSES, json=body, headers=EVENTS)).text
        events = whole.split("\n\n")[:-1]
        for at in range(1, len(events) + 1):
            last = events[at - 1].partition("\n")[0].removeprefix("id: ")
            rest = await here.post(RESPONSES, json=body, headers={"last-event-id": last})
            assert without_times(rest.text.split("\n\n")[:-1]) == without_times(events[at:])
        items = (await here.get(f"/v1/conversations/{talk}/items")).json()["data"]
        assert [item["role"] for item in items] == ["assistant", "user"]

    play(scene)
