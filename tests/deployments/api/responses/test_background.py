"""Responses in the background: they survive their client, are bounded, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.api import TextCodec
from deployments.api.http.access import AccessControl
from deployments.api.responses.kept import KeptResponses
from deployments.client.protocol import Overloaded
from deployments.config.settings import ResponseSettings
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from tests.deployments.api.responses.conftest import ASK, RESPONSES, Responses, events_of
from tests.deployments.support.turns import turns
from tests.deployments.support.virtual_time import run
from tests.deployments.support.watched_api import WAIT, WatchedApi, WatchedClient, left_running

Make = Callable[..., Responses]
SAID = "The quick brown fox jumps over the lazy dog."
LATER: dict[str, Any] = ASK | {"background": True}


async def ended(http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """The response once it has ended."""
    while True:
        response: dict[str, Any] = (await http.get(f"{RESPONSES}/{name}")).json()
        if response["status"] not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0)


async def begun(http: httpx.AsyncClient, **change: Any) -> dict[str, Any]:
    answer = await http.post(RESPONSES, json=LATER | change)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def test_the_answer_is_generated_after_the_request_was_answered(ask: Make) -> None:
    it = ask()

    async def scene(http: httpx.AsyncClient) -> None:
        queued = await begun(http)
        assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
        response = await ended(http, queued["id"])
        assert response["status"] == "completed"
        assert response["output"][0]["content"][0]["text"] == SAID and response["usage"]["output_tokens"] > 0
        assert (await begun(http, previous_response_id=queued["id"]))["status"] == "queued"
        cut = await ended(http, (await begun(http, max_output_tokens=2))["id"])
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})

    it.play(scene)


def test_a_running_response_is_cancelled_and_keeps_its_output(ask: Make) -> None:
    it = ask()
    it.engine.hangs = True

    async def scene(http: httpx.AsyncClient) -> None:
        path = f"{RESPONSES}/{(await begun(http))['id']}"
        while not (running := (await http.get(path)).json())["output"]:
            assert running["status"] in ("queued", "in_progress")
            await asyncio.sleep(0)
        refused = await http.post(RESPONSES, json=LATER | {"previous_response_id": running["id"]})
        assert refused.status_code == 400 and "still being generated" in refused.json()["error"]["message"]
        for _ in range(2):
            cancelled = (await http.post(f"{path}/cancel")).json()
            assert cancelled["status"] == "cancelled" and cancelled["output"]
            assert (await http.get(path)).json() == cancelled
        assert it.engine.generations[0].closed

    it.play(scene)


def test_a_background_response_is_cancelled_before_it_has_begun_and_by_its_deletion(ask: Make) -> None:
    it = ask()
    it.engine.hangs = True

    async def scene(http: httpx.AsyncClient) -> None:
        for method, rest, status in (("POST", "/cancel", 200), ("DELETE", "", 404)):
            name = (await begun(http))["id"]
            assert (await http.request(method, f"{RESPONSES}/{name}{rest}")).status_code == 200
            assert (await http.get(f"{RESPONSES}/{name}")).status_code == status
        assert all(generation.closed for generation in it.engine.generations)

    it.play(scene)


def test_only_background_responses_are_cancelled(ask: Make) -> None:
    it = ask()
    refused = it.client.post(f"{RESPONSES}/{it.whole()['id']}/cancel")
    assert refused.status_code == 400 and "background" in refused.json()["error"]["message"]


def test_a_failure_is_read_from_the_response(ask: Make) -> None:
    it = ask()
    it.engine.refuse_with = Overloaded("no room", 1.0)

    async def scene(http: httpx.AsyncClient) -> None:
        failed = await ended(http, (await begun(http))["id"])
        assert failed["status"] == "failed" and "no room" in failed["error"]["message"]
        assert failed["error"]["code"] == "rate_limit_exceeded"

    it.play(scene)


def test_a_failure_ends_its_stream_too(ask: Make) -> None:
    """Also where nothing was generated before it."""
    it = ask()
    it.engine.refuse_with = Overloaded("no room", 1.0)

    async def scene(http: httpx.AsyncClient) -> None:
        live = events_of((await http.post(RESPONSES, json=LATER | {"stream": True})).text)
        kinds = [event["type"] for event in live]
        assert kinds == [f"response.{kind}" for kind in ("created", "queued", "in_progress")] + [
            "error", "response.failed",
        ]  # fmt: skip
        assert "no room" in live[-2]["message"] and live[-2]["request_id"]
        again = await http.get(f"{RESPONSES}/{live[-1]['response']['id']}", params={"stream": "true"})
        assert events_of(again.text) == live

    it.play(scene)


def test_a_bad_request_is_refused_immediately(ask: Make) -> None:
    assert ask().refused(background=True, input=[])["param"] == "input"


def test_the_stream_of_a_background_response_is_read_while_it_runs_and_again_from_any_event(ask: Make) -> None:
    it = ask()

    async def scene(http: httpx.AsyncClient) -> None:
        live = events_of((await http.post(RESPONSES, json=LATER | {"stream": True})).text)
        kinds = [event["type"] for event in live]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        path = f"{RESPONSES}/{live[-1]['response']['id']}"
        again = await http.get(path, params={"stream": "true"})
        assert events_of(again.text) == live
        rest = await http.get(path, params={"stream": "true", "starting_after": "5"})
        assert again.text.endswith(rest.text) and rest.text.count("event: ") == len(live) - 6
        wrong = await http.get(path, params={"stream": "true", "starting_after": "x"})
        assert wrong.status_code == 400
        plain = await ended(http, (await begun(http))["id"])
        none = await http.get(f"{RESPONSES}/{plain['id']}", params={"stream": "true"})
        assert none.status_code == 400 and "background and stream" in none.json()["error"]["message"]

    it.play(scene)


def test_no_more_background_responses_run_than_configured(ask: Make) -> None:
    it = ask()
    it.engine.hangs = True
    service = replace(it.talk.service, responses=KeptResponses(ResponseSettings(max_background=2)))
    bounded = Responses(it.talk.of(service))

    async def scene(http: httpx.AsyncClient) -> None:
        names = [(await begun(http))["id"] for _ in range(2)]
        refused = await http.post(RESPONSES, json=LATER)
        assert refused.status_code == 429 and "responses.max_background" in refused.json()["error"]["message"]
        await http.post(f"{RESPONSES}/{names[0]}/cancel")
        await begun(http)
        await service.responses.background.aclose()
        assert service.responses.background.num_running == 0
        stopped = (await http.get(f"{RESPONSES}/{names[1]}")).json()
        assert stopped["status"] == "failed" and "stopped" in stopped["error"]["message"]

    bounded.play(scene)
    nothing = replace(it.talk.service, responses=KeptResponses(ResponseSettings(max_bytes=0)))
    assert "responses.max_bytes" in Responses(it.talk.of(nothing)).refused(background=True)["message"]


def test_no_tenant_takes_more_than_half_of_them(ask: Make) -> None:
    it = ask()
    it.engine.hangs = True
    keys = KeyRing([TenantSettings(name=name, key_hashes=(hash_key(f"key-of-{name}"),)) for name in "ab"])
    kept = KeptResponses(ResponseSettings(max_background=3))
    service = replace(it.talk.service, responses=kept, access=AccessControl(keys))

    async def scene(http: httpx.AsyncClient) -> None:
        async def post(name: str) -> httpx.Response:
            return await http.post(RESPONSES, json=LATER, headers={"authorization": f"Bearer key-of-{name}"})

        assert [(await post("a")).status_code for _ in range(3)] == [200, 200, 429]
        assert [(await post("b")).status_code for _ in range(2)] == [200, 429]
        await kept.background.aclose()

    Responses(it.talk.of(service)).play(scene)


def test_background_responses_count_towards_the_limits_of_their_tenant(ask: Make) -> None:
    it = ask()
    it.engine.hangs = True
    tenant = TenantSettings(name="t", key_hashes=(hash_key("k" * 20),), max_concurrency=1, requests_per_minute=2)
    access = AccessControl(KeyRing((tenant,)))
    limited = Responses(it.talk.of(replace(it.talk.service, access=access)))

    async def scene(http: httpx.AsyncClient) -> None:
        headers = {"authorization": "Bearer " + "k" * 20}
        first = await http.post(RESPONSES, json=LATER, headers=headers)
        assert first.status_code == 200 and first.headers["x-ratelimit-remaining-requests"] == "1"
        refused = await http.post(RESPONSES, json=LATER, headers=headers)
        assert refused.status_code == 429 and "max_concurrency" in refused.json()["error"]["message"]
        assert access.num_open() == {"t": 1}
        await http.post(f"{RESPONSES}/{first.json()['id']}/cancel", headers=headers)
        assert access.num_open() == {"t": 0}

    limited.play(scene)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_at_any_turn_leaves_nothing_but_the_response(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def scenario() -> None:
        api = WatchedApi(codec, monkeypatch)
        turn, has_ended = 0, False
        while not has_ended:
            turn += 1
            api.load.num_checks = WAIT
            client = WatchedClient(api.app, RESPONSES, {"input": "hi", "background": True, "stream": stream})
            turns().at_turn(turns().num_turns + turn, client.leave)
            await asyncio.wait([client.task])
            has_ended = not client.has_left.is_set()
            await asyncio.sleep(3600)
            left = api.left() | left_running()
            assert not left, f"left at turn {turn}"
        assert turn > 5

    run(scenario())
