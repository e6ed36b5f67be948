"""Stored responses: read, continued, listed, deleted; whose they are; and how many there may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from deployments.api.base.errors import ApiError
from deployments.api.responses.store import RECORD_BYTES, MemoryStore
from deployments.api.responses.stored import StoredResponse
from deployments.config.tenants import TenantSettings, hash_key
from engine.loading.load_model import load_model
from tests.deployments.api.responses.conftest import RESPONSES, Responses
from tests.deployments.support.api_over_engines import api_over

DEMO: dict[str, Any] = {"load": load_model, "model": "demo", "kv_pages": 256, "page_size": 16}
Make = Callable[..., Responses]


def test_a_response_is_read_and_deleted(ask: Make) -> None:
    it = ask()
    for response in (it.whole(), it.events()[-1]["response"]):
        path = f"{RESPONSES}/{response['id']}"
        assert it.client.get(path).json() == response
        assert it.client.request("DELETE", path).json() == {
            "id": response["id"], "object": "response", "deleted": True,
        }  # fmt: skip
        for method in ("GET", "DELETE"):
            gone = it.client.request(method, path)
            assert gone.status_code == 404 and gone.json()["error"]["code"] == "response_not_found"
    assert it.client.get(f"{RESPONSES}/{it.whole(store=False)['id']}").status_code == 404


def test_a_record_is_read_as_it_was_written() -> None:
    long = b"x" * 70_000
    for record in (StoredResponse(b"{}", b"[]"), StoredResponse(long, b"", ["a"] * 40, long, "conv_1", 1.5)):
        assert msgspec.msgpack.decode(record.packed(), type=StoredResponse) == record
        assert msgspec.msgpack.decode(record.packed()) == msgspec.structs.asdict(record)


def test_a_response_is_stored_before_its_stream_ends(ask: Make) -> None:
    """A client that has the last event can go on at once."""
    it = ask()
    response = it.events()[-1]["response"]
    assert it.whole(previous_response_id=response["id"])["previous_response_id"] == response["id"]


def test_input_items_are_all_that_a_response_answers(ask: Make) -> None:
    it = ask()
    first = it.whole(input="one", instructions="Not listed.")
    second = it.whole(input=[{"role": "user", "content": "two"}], previous_response_id=first["id"])
    path = f"{RESPONSES}/{second['id']}/input_items"
    page = it.client.get(path, params={"order": "asc"}).json()
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["one", first["output"][0]["content"][0]["text"], "two"]
    assert [item["role"] for item in page["data"]] == ["user", "assistant", "user"]
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    newest = it.client.get(path, params={"limit": "2"}).json()
    assert newest["data"] == page["data"][:0:-1] and newest["has_more"]
    rest = it.client.get(path, params={"after": newest["last_id"]}).json()
    assert rest["data"] == page["data"][:1] and not rest["has_more"]
    for wrong in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "msg_1"}):
        (name,) = wrong
        refused = it.client.get(path, params=wrong)
        assert refused.status_code == (404 if name == "after" else 400)
        assert refused.json()["error"]["param"] == name


def test_a_conversation_whose_beginning_is_gone_cannot_be_continued(ask: Make) -> None:
    it = ask()
    first = it.whole()
    second = it.whole(previous_response_id=first["id"])
    it.client.request("DELETE", f"{RESPONSES}/{first['id']}")
    assert it.client.get(f"{RESPONSES}/{second['id']}").status_code == 200
    assert first["id"] in it.refused(previous_response_id=second["id"])["message"]


def test_a_conversation_that_is_continued_is_found_in_the_cache() -> None:
    """The engine's own tokens: the prompt of the second turn begins with all of the first, question and answer."""

    async def play() -> None:
        async with api_over(1, **DEMO) as api:
            asked: dict[str, Any] = {"model": "m", "input": "one two three", "max_output_tokens": 6, "seed": 1}
            first = (await api.http.post(RESPONSES, json=asked)).json()
            known = first["usage"]["input_tokens"]
            again = {**asked, "input": "four", "previous_response_id": first["id"]}
            by_id = (await api.http.post(RESPONSES, json=again)).json()
            assert by_id["usage"]["input_tokens_details"]["cached_tokens"] >= known
            items = [
                {"role": "user", "content": "one two three"},
                *first["output"],
                {"role": "user", "content": "four"},
            ]
            whole = (await api.http.post(RESPONSES, json={**asked, "input": items})).json()
            assert whole["usage"]["input_tokens"] == by_id["usage"]["input_tokens"]
            assert whole["usage"]["input_tokens_details"]["cached_tokens"] == whole["usage"]["input_tokens"] - 1

    asyncio.run(play())


def test_a_tenants_responses_do_not_exist_for_another() -> None:
    tenants = [TenantSettings(name=name, key_hashes=(hash_key(f"key-of-{name}"),)) for name in ("a", "b")]

    async def play() -> None:
        async with api_over(1, tenants=tenants, **DEMO) as api:
            keys = {name: {"authorization": f"Bearer key-of-{name}"} for name in ("a", "b")}
            asked = {"model": "m", "input": "hi", "max_output_tokens": 2}
            made = (await api.http.post(RESPONSES, json=asked, headers=keys["a"])).json()
            path = f"{RESPONSES}/{made['id']}"
            item = {"type": "item_reference", "id": made["output"][0]["id"]}
            for method, url in (
                ("GET", path),
                ("GET", f"{path}/input_items"),
                ("POST", f"{path}/cancel"),
                ("DELETE", path),
            ):
                strange = await api.http.request(method, url, headers=keys["b"])
                unknown = await api.http.request(
                    method, url.replace(made["id"], "resp_" + "1" * 32), headers=keys["b"]
                )
                assert strange.status_code == unknown.status_code == 404
                assert strange.json()["error"]["code"] == unknown.json()["error"]["code"]
            for change in ({"previous_response_id": made["id"]}, {"input": [item]}):
                assert (await api.http.post(RESPONSES, json=asked | change, headers=keys["b"])).status_code in (
                    400,
                    404,
                )
                assert (await api.http.post(RESPONSES, json=asked | change, headers=keys["a"])).status_code == 200
            assert (await api.http.get(path, headers=keys["a"])).status_code == 200

    asyncio.run(play())


SIZE = RECORD_BYTES + 100
RECORD = b"x" * 100


async def put(store: MemoryStore, tenant: str, *names: str) -> None:
    for name in names:
        await store.put(tenant, name, RECORD)


async def held(store: MemoryStore, tenant: str, *names: str) -> list[bool]:
    return [record is not None for record in await store.get(tenant, names)]


def test_a_full_memory_forgets_the_least_recently_used_response() -> None:
    async def play() -> None:
        store = MemoryStore(3 * SIZE, 100)
        await put(store, "a", "1", "2", "3")
        assert await held(store, "a", "1") == [True]
        await put(store, "a", "4")
        assert await held(store, "a", "1", "2", "3", "4") == [True, False, True, True]
        with pytest.raises(ApiError, match="can be stored"):
            await store.put("a", "large", b"x" * 3 * SIZE)
        assert await held(store, "a", "large", "1", "3", "4") == [False, True, True, True]
        assert store.num_bytes == 3 * SIZE
        for name in ("1", "3", "4"):
            assert await store.delete("a", name) and not await store.delete("a", name)
        assert store.num_bytes == 0

    asyncio.run(play())


def test_a_tenant_pushes_out_its_own_before_those_of_one_with_less() -> None:
    async def play() -> None:
        store = MemoryStore(4 * SIZE, 100)
        await put(store, "quiet", "1", "2")
        await put(store, "loud", *map(str, range(50)))
        assert await held(store, "quiet", "1", "2") == [True, True]
        assert await held(store, "loud", "47", "48", "49") == [False, True, True]

    asyncio.run(play())


@pytest.mark.parametrize("is_used", [False, True])
def test_unused_responses_are_forgotten_in_time(is_used: bool) -> None:
    async def play() -> None:
        time = 0.0
        store = MemoryStore(10 * SIZE, 100, clock=lambda: time)
        await put(store, "a", "1")
        time = 90.0
        if is_used:
            await held(store, "a", "1")
        time = 150.0
        assert await held(store, "a", "1") == [is_used]
        assert store.num_bytes == (SIZE if is_used else 0)

    asyncio.run(play())
