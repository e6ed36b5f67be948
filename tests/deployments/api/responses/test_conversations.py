"""/v1/conversations: kept by name, added to by clients and responses, and never in part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.api import Limits, create_app
from deployments.api.http.access import AccessControl
from deployments.api.responses.kept import KeptResponses
from deployments.config.settings import ResponseSettings
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from engine.loading.load_model import load_model
from tests.deployments.api.responses.conftest import ASK, RESPONSES, Responses
from tests.deployments.support.api_over_engines import api_over

Make = Callable[..., Responses]
TOP = "/v1/conversations"
DEMO: dict[str, Any] = {"load": load_model, "model": "demo", "kv_pages": 256, "page_size": 16}


def made(it: Responses, *texts: str, **fields: Any) -> str:
    """Make a conversation of what the user has said; return its path."""
    items = [{"role": "user", "content": text} for text in texts]
    return f"{TOP}/{it.client.post(TOP, {'items': items, **fields}).json()['id']}"


def said(it: Responses, path: str) -> list[str]:
    page = it.client.get(f"{path}/items", params={"order": "asc", "limit": "100"}).json()
    return [item["content"][0]["text"] for item in page["data"]]


def test_openais_client_makes_reads_changes_and_deletes_one(ask: Make) -> None:
    async def scene(ai: Any) -> None:
        talk = await ai.conversations.create(
            metadata={"topic": "rain"}, items=[{"type": "message", "role": "user", "content": "one"}]
        )
        assert talk.object == "conversation" and talk.metadata == {"topic": "rain"} and talk.created_at > 0
        assert await ai.conversations.retrieve(talk.id) == talk
        added = await ai.conversations.items.create(
            talk.id,
            items=[
                {"type": "message", "role": "assistant", "content": "two"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            ],
        )
        assert [item.type for item in added.data] == ["message", "function_call"]
        listed = [item async for item in ai.conversations.items.list(talk.id, order="asc", limit=2)]
        assert [item.type for item in listed] == ["message", "message", "function_call"]
        assert len({item.id for item in listed}) == 3
        one = await ai.conversations.items.retrieve(listed[1].id, conversation_id=talk.id)
        assert one.content[0].text == "two"
        assert (await ai.conversations.items.delete(listed[1].id, conversation_id=talk.id)).id == talk.id
        rest = [item.id async for item in ai.conversations.items.list(talk.id)]
        assert rest == [listed[2].id, listed[0].id]
        changed = await ai.conversations.update(talk.id, metadata={"topic": "sun"})
        assert changed.metadata == {"topic": "sun"}
        assert (await ai.conversations.retrieve(talk.id)).metadata == {"topic": "sun"}
        gone = await ai.conversations.delete(talk.id)
        assert gone.deleted and gone.object == "conversation.deleted"

    ask().client.run(scene)


@pytest.mark.parametrize("form", ["name", "object"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_continues_its_conversation_and_becomes_a_part_of_it(
    ask: Make, form: str, stream: bool
) -> None:
    it = ask()
    path = made(it, "one")
    name = path.rpartition("/")[2]
    given: Any = name if form == "name" else {"id": name}
    answer = it.events(conversation=given)[-1]["response"] if stream else it.whole(conversation=given)
    assert answer["conversation"] == {"id": name}
    assert said(it, path) == ["one", ASK["input"], it.engine.says]
    it.whole(conversation=given, store=False, input="two")
    assert said(it, path) == ["one", ASK["input"], it.engine.says, "two", it.engine.says]
    first = it.engine.requests[0].prompt_ids
    whole = [{"role": "user", "content": "one"}, {"role": "user", "content": ASK["input"]}]
    it.whole(input=whole)
    assert it.engine.requests[-1].prompt_ids == first
    refused = it.refused(previous_response_id=answer["id"])
    assert name in refused["message"] and refused["param"] == "previous_response_id"


def test_a_background_response_is_added_to_its_conversation_too(ask: Make) -> None:
    it = ask()
    path = made(it, "one")

    async def scene(http: httpx.AsyncClient) -> None:
        asked = ASK | {"background": True, "conversation": path.rpartition("/")[2]}
        name = (await http.post(RESPONSES, json=asked)).json()["id"]
        async with asyncio.timeout(60):
            while (await http.get(f"{RESPONSES}/{name}")).json()["status"] != "completed":
                await asyncio.sleep(0)

    it.play(scene)
    assert said(it, path) == ["one", ASK["input"], it.engine.says]


def test_a_continued_conversation_is_found_in_the_cache() -> None:
    async def play() -> None:
        async with api_over(1, **DEMO) as api:
            name = (await api.http.post(TOP, json={})).json()["id"]
            # What is drawn at random may be text that no tokenizer would make of these tokens.
            asked = {"model": "m", "input": "one two three", "max_output_tokens": 6, "temperature": 0}
            asked["conversation"] = name
            first = (await api.http.post(RESPONSES, json=asked)).json()
            second = (await api.http.post(RESPONSES, json=asked | {"input": "four"})).json()
            cached = second["usage"]["input_tokens_details"]["cached_tokens"]
            assert cached >= first["usage"]["input_tokens"] + first["usage"]["output_tokens"] - 1

    asyncio.run(play())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"conversation": "conv_" + "0" * 32}, "conversation"),
        ({"conversation": "../conv"}, "conversation"),
        ({"conversation": 7}, "conversation"),
        ({"conversation": {"name": "c"}}, "conversation"),
        ({"conversation": "conv_" + "0" * 32, "previous_response_id": "resp_1"}, "conversation"),
    ],
)
def test_a_conversation_that_is_not_there_is_refused(ask: Make, change: dict[str, Any], param: str) -> None:
    assert ask().refused(**change)["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": "one"}, "items"),
        ("", {"items": [7]}, "items.0"),
        ("", {"items": [{"type": "web_search_call"}, {"role": "king"}]}, "items.1.role"),
        ("", {"metadata": {"a": 1}}, "metadata.a"),
        ("", {"metadata": {"a" * 65: ""}}, "metadata"),
        ("/ID", {}, "metadata"),
        ("/ID/items", {}, "items"),
        ("/ID/items", {"items": []}, "items"),
        ("/ID/items", {"items": [{"role": "king", "content": "x"}]}, "items.0.role"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_and_changes_nothing(
    ask: Make, path: str, body: dict[str, Any], param: str
) -> None:
    it = ask()
    one = made(it, "one")
    refused = it.client.post(TOP + path.replace("/ID", one.removeprefix(TOP)), body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
    assert said(it, one) == ["one"]


def test_a_missing_conversation_or_item_is_a_404(ask: Make) -> None:
    it = ask()
    path = made(it, "one")
    strange = f"{TOP}/conv_{'1' * 32}"
    for method, url, code in (
        ("GET", strange, "conversation_not_found"),
        ("POST", strange, "conversation_not_found"),
        ("DELETE", strange, "conversation_not_found"),
        ("DELETE", f"{TOP}/x", "conversation_not_found"),
        ("GET", f"{strange}/items", "conversation_not_found"),
        ("GET", f"{path}/items/msg_1", "item_not_found"),
        ("DELETE", f"{path}/items/msg_1", "item_not_found"),
    ):
        answer = it.client.request(method, url, json={"metadata": {}} if method == "POST" else None)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == code, (method, url)


def test_a_conversation_is_no_larger_than_a_body(ask: Make) -> None:
    it = ask(limits=Limits.model_validate({"max_body_bytes": 4096, "max_total_body_bytes": 4 * 4096}))
    path = made(it, "x" * 3000)
    refused = it.client.post(f"{path}/items", {"items": [{"role": "user", "content": "y" * 1000}]})
    assert refused.status_code == 400 and "limits.max_body_bytes" in refused.json()["error"]["message"]
    assert said(it, path) == ["x" * 3000]


@pytest.mark.parametrize("store", ["memory", "file"])
def test_items_that_several_clients_add_together_are_all_there(ask: Make, tmp_path: Path, store: str) -> None:
    """With a directory, two ingresses add to the same conversation."""
    it = ask()
    settings = ResponseSettings(store="memory" if store == "memory" else f"file://{tmp_path}/kept")

    async def run() -> None:
        services = [replace(it.talk.service, responses=KeptResponses(settings)) for _ in range(2)]
        apps = [create_app(service) for service in (services if store == "file" else services[:1] * 2)]
        clients = [httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") for app in apps]
        path = f"{TOP}/{(await clients[0].post(TOP, json={})).json()['id']}"

        async def add(number: int) -> None:
            items = [{"role": "user", "content": f"{number}"}]
            assert (await clients[number % 2].post(f"{path}/items", json={"items": items})).status_code == 200

        await asyncio.gather(*map(add, range(30)))
        found = (await clients[1].get(f"{path}/items", params={"limit": "100"})).json()["data"]
        assert {item["content"][0]["text"] for item in found} == {str(number) for number in range(30)}
        assert len({item["id"] for item in found}) == 30
        names = [item["id"] for item in found[:20]]
        gone = [clients[at % 2].delete(f"{path}/items/{name}") for at, name in enumerate(names)]
        assert {answer.status_code for answer in await asyncio.gather(*gone)} == {200}
        left = (await clients[0].get(f"{path}/items", params={"limit": "100"})).json()["data"]
        assert [item["id"] for item in left] == [item["id"] for item in found[20:]]

    asyncio.run(run())


def test_a_tenants_conversations_do_not_exist_for_another(ask: Make) -> None:
    it = ask()
    tenants = [TenantSettings(name=name, key_hashes=(hash_key(f"key-of-{name}"),)) for name in ("a", "b")]
    app = create_app(replace(it.talk.service, access=AccessControl(KeyRing(tenants))))

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            keys = {name: {"authorization": f"Bearer key-of-{name}"} for name in ("a", "b")}
            name = (await http.post(TOP, json={}, headers=keys["a"])).json()["id"]
            asks: list[tuple[str, str, Any]] = [
                ("GET", f"{TOP}/{name}", None),
                ("POST", f"{TOP}/{name}", {"metadata": {}}),
                ("POST", f"{TOP}/{name}/items", {"items": [{"role": "user", "content": "x"}]}),
                ("GET", f"{TOP}/{name}/items", None),
                ("DELETE", f"{TOP}/{name}", None),
                ("POST", RESPONSES, ASK | {"conversation": name}),
            ]
            for method, path, body in asks:
                assert (await http.request(method, path, json=body, headers=keys["b"])).status_code == 404
            for method, path, body in asks[:4]:
                assert (await http.request(method, path, json=body, headers=keys["a"])).status_code == 200

    asyncio.run(run())
