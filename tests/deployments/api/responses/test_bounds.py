"""What a request reads of stored responses, and what its answer repeats of it, is bounded as bodies are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from deployments.admission.fair_threads import FairThreads
from deployments.api import Limits
from deployments.api.http.body_memory import BodyMemory
from tests.deployments.api.responses.conftest import ASK, RESPONSES, Responses, events_of

Make = Callable[..., Responses]
SMALL = Limits(max_body_bytes=50_000, max_total_body_bytes=400_000)
LONG = [{"role": "user", "content": "word " * 4_000}, {"role": "user", "content": "hi"}]
"""Some 20 kB, of which the model reads the end."""


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[BodyMemory]:
    """The room for bodies of each service that a test makes."""
    made: list[BodyMemory] = []

    def memory(max_bytes: int, *, has_tenants: bool) -> BodyMemory:
        made.append(BodyMemory(max_bytes, has_tenants=has_tenants))
        return made[-1]

    monkeypatch.setattr("deployments.api.service.workroom.BodyMemory", memory)
    return made


def item_of(response: dict[str, Any], index: int = 0) -> dict[str, str]:
    """A reference to an item of a response's input."""
    return {"type": "item_reference", "id": f"msg_{response['id'].removeprefix('resp_')}i{index}"}


def test_a_reference_counts_as_the_item_that_it_names_each_time(ask: Make) -> None:
    it = ask(limits=SMALL)
    long = it.whole(input=LONG, truncation="auto")
    twice = [item_of(long), item_of(long), {"role": "user", "content": "hi"}]
    assert it.whole(input=twice, truncation="auto")["status"] == "completed"
    error = it.refused(input=[item_of(long)] * 20, truncation="auto")
    assert error["param"] == "input" and "limits.max_body_bytes" in error["message"]


def test_a_conversation_is_continued_up_to_the_size_of_a_body(ask: Make) -> None:
    it = ask(limits=SMALL)
    first = it.whole(input=LONG, truncation="auto")
    second = it.whole(input=LONG, truncation="auto", previous_response_id=first["id"])
    third = it.whole(input=LONG, truncation="auto", previous_response_id=second["id"])
    error = it.refused(truncation="auto", previous_response_id=third["id"])
    assert error["param"] == "previous_response_id" and "limits.max_body_bytes" in error["message"]


def test_a_conversation_is_continued_up_to_the_values_of_a_body(ask: Make) -> None:
    it = ask(limits=Limits(max_json_values=2_000))
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 40}]
    first = it.whole(input=parts)
    second = it.whole(input=parts, previous_response_id=first["id"])
    error = it.refused(previous_response_id=second["id"])
    assert error["param"] == "previous_response_id" and "limits.max_json_values" in error["message"]


def test_stored_conversations_are_read_only_where_there_is_room(ask: Make, memories: list[BodyMemory]) -> None:
    it = ask(limits=SMALL)
    first = it.whole(input=LONG, truncation="auto")

    async def scene(http: httpx.AsyncClient) -> None:
        (memory,) = memories[-1:]
        path = f"{RESPONSES}/{first['id']}/input_items"
        for room, status in ((100_000, 200), (10_000, 429)):
            taken = 400_000 - room
            memory.take("another", taken // 2)
            memory.take("a third", taken - taken // 2)
            listed = await http.get(path)
            continued = await http.post(
                RESPONSES, json=ASK | {"previous_response_id": first["id"], "truncation": "auto"}
            )
            named = await http.post(RESPONSES, json=ASK | {"input": [item_of(first)], "truncation": "auto"})
            assert [listed.status_code, continued.status_code, named.status_code] == [status] * 3
            if status == 429:
                assert "limits.max_total_body_bytes" in listed.json()["error"]["message"]
            memory.give_back("another", taken // 2)
            memory.give_back("a third", taken - taken // 2)
            assert memory.num_bytes == 0

    it.play(scene)


def test_conversations_are_listed_in_their_tenants_turn(ask: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    it = ask()
    first = it.whole()
    asked, run = [], FairThreads.run

    async def noted(threads: FairThreads, tenant: str, work: Callable[[], Any]) -> Any:
        asked.append(tenant)
        return await run(threads, tenant, work)

    monkeypatch.setattr(FairThreads, "run", noted)
    assert it.client.get(f"{RESPONSES}/{first['id']}/input_items").status_code == 200
    assert asked == ["anonymous"]


@pytest.mark.parametrize(
    ("change", "least"),
    [
        ({"metadata": {"a": "x" * 40_000}}, 39_000),
        ({"metadata": {"a": "x" * 40_000}, "store": False}, 39_000),
        ({"metadata": {"a": "x" * 40_000}, "background": True}, 234_000),
        ({"input": "word " * 2_000}, 0),
    ],
    ids=["repeated", "not stored", "each time", "prompt"],
)
def test_the_parts_of_a_request_that_its_answer_holds_count_until_its_end(
    ask: Make, memories: list[BodyMemory], change: dict[str, Any], least: int
) -> None:
    """But not what the prompt explains: admission bounds tokens."""
    it = ask(limits=SMALL)
    it.engine.hangs = True

    async def scene(http: httpx.AsyncClient) -> None:
        task = asyncio.create_task(http.post(RESPONSES, json=ASK | change | {"stream": True}))
        while not it.engine.generations:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        (memory,) = memories[-1:]
        assert least <= memory.num_bytes <= least + 10_000
        it.engine.generations[0].hangs = False
        task.cancel()
        await it.talk.service.responses.background.aclose()
        await asyncio.wait([task])
        assert memory.num_bytes == 0

    it.play(scene)


def test_an_answer_that_would_hold_too_much_is_refused(ask: Make, memories: list[BodyMemory]) -> None:
    """Nothing of it reaches an engine."""
    it = ask(limits=SMALL)

    async def scene(http: httpx.AsyncClient) -> None:
        (memory,) = memories[-1:]
        asked = ASK | {"metadata": {"a": "x" * 40_000}, "background": True, "stream": True}
        memory.take("another", 300_000)
        events = events_of((await http.post(RESPONSES, json=asked)).text)
        assert it.engine.requests == []
        assert "limits.max_total_body_bytes" in events[-1]["response"]["error"]["message"]
        assert memory.num_bytes == 300_000

    it.play(scene)
