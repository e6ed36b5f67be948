"""/v1/batches: what OpenAI's client leaves is answered, continued after a death, cancelled, and expires."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.deployments.api.batches.conftest import CHAT, Ingress, Office, line, lines
from tests.deployments.support.scripted_api import ScriptedEngine


def test_a_batch_is_answered(office: Office) -> None:
    async def scene(ingress: Ingress) -> None:
        wrong = line("bad", temperature=-1)
        begun = await ingress.begin(lines("a", "b", "c") + f"\n\n{wrong}\n".encode(), metadata={"run": "7"})
        assert (begun.object, begun.endpoint, begun.metadata) == ("batch", CHAT, {"run": "7"})
        assert begun.status == "validating" and begun.expires_at == begun.created_at + 86_400
        batch = await ingress.until(begun, "completed")
        counts = batch.request_counts
        assert counts is not None and (counts.total, counts.completed, counts.failed) == (4, 3, 1)
        answers = await ingress.read(batch.output_file_id)
        assert list(answers) == ["a", "b", "c"]
        for answer in answers.values():
            assert answer["id"].startswith("batch_req_") and answer["error"] is None
            assert answer["response"]["status_code"] == 200 and answer["response"]["request_id"]
            assert answer["response"]["body"]["choices"][0]["message"]["content"] == office.engine.says
        (error,) = (await ingress.read(batch.error_file_id)).values()
        assert error["response"]["status_code"] == 400
        assert error["response"]["body"]["error"]["param"] == "temperature"
        assert batch.in_progress_at and batch.finalizing_at and batch.completed_at and batch.errors is None
        about = await ingress.ai.files.retrieve(str(batch.output_file_id))
        assert about.purpose == "batch_output" and about.filename == f"{batch.id}_output.jsonl"

    office.play(scene)
    assert {request.priority for request in office.engine.requests} == {10}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20}),
    ],
)
def test_each_endpoint_can_be_asked(office: Office, endpoint: str, body: dict[str, Any]) -> None:
    if endpoint == "/v1/embeddings":
        office = _embedding(office)

    async def scene(ingress: Ingress) -> None:
        asked = line("a", endpoint, **body)
        if "messages" not in body:
            asked = asked.replace('"messages": [{"role": "user", "content": "a"}], ', "")
        batch = await ingress.until(await ingress.begin(asked.encode(), endpoint), "completed")
        (answer,) = (await ingress.read(batch.output_file_id)).values()
        assert answer["response"]["body"]["model"] == "demo"

    office.play(scene)


@pytest.mark.parametrize(
    ("endpoint", "left_out", "named"),
    [
        (CHAT, {"shiny": 1, "tools": [{"type": "web_search"}]}, "shiny, tools.0:web_search"),
        (CHAT, {"shiny": 1, "temperature": -1}, "shiny"),  # an error may be the consequence
        (CHAT, {"user": "me"}, None),
        ("/v1/messages", {"max_tokens": 20, "thinking": {"type": "disabled", "x": 1}}, "thinking.x"),
        ("/v1/responses", {"input": "a", "text": {"x": 1}}, "messages, text.x"),
    ],
)
def test_ignored_fields_of_a_request_are_named_in_its_line(
    office: Office, endpoint: str, left_out: dict[str, Any], named: str | None
) -> None:
    async def scene(ingress: Ingress) -> None:
        asked = line("a", endpoint, **left_out)
        batch = await ingress.until(await ingress.begin(asked.encode(), endpoint), "completed")
        (answer,) = (await ingress.read(batch.output_file_id or batch.error_file_id)).values()
        headers = answer["response"].get("headers")
        assert headers == (None if named is None else {"x-raydix-ignored-fields": named})

    office.play(scene)


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"nonsense", "invalid_json_line", 1),
        (b"\n" + lines("a", "a"), "duplicate_custom_id", 3),
        (line("a", "/v1/models").encode(), "invalid_url", 1),
        (line("a", "/v1/completions").encode(), "mismatched_endpoint", 1),
        (line("a").replace("POST", "GET").encode(), "invalid_method", 1),
        (lines("a") + b'\n{"custom_id": 7}', "invalid_request", 2),
        (line("a", stream=True).encode(), "unsupported_field", 1),
        (b"\n \n", "empty_file", None),
        (lines("a", "b", "c", "d"), "too_many_requests", 4),
    ],
)
def test_a_file_that_is_no_batch_fails_with_its_lines(
    office: Office, content: bytes, code: str, number: int | None
) -> None:
    async def scene(ingress: Ingress) -> None:
        batch = await ingress.until(await ingress.begin(content), "failed")
        problems = batch.errors.data
        assert [(problem.code, problem.line) for problem in problems] == [(code, number)]
        assert problems[0].message and str(office.directory) not in problems[0].message
        assert batch.failed_at and batch.output_file_id is None and batch.error_file_id is None

    office.play(scene, max_requests=3)
    assert not office.engine.requests


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "30d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 5000}}, "output_expires_after.anchor"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(office: Office, change: dict[str, Any], param: str) -> None:
    async def scene(ingress: Ingress) -> None:
        file = await ingress.upload(lines("a"))
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **change}
        refused = await ingress.http.post("/v1/batches", json=body)
        assert refused.status_code in (400, 404) and refused.json()["error"]["param"] == param, refused.text
        assert (await ingress.ai.batches.list()).data == []

    office.play(scene)


def test_a_cancelled_batch_keeps_the_answers_that_it_has(office: Office) -> None:
    """Nobody answers the second request: it is in flight when the batch is cancelled."""

    async def scene(ingress: Ingress) -> None:
        _hang_after(office.engine, 1)
        begun = await ingress.begin(lines("a", "b", "c"))
        async with asyncio.timeout(60):
            while len(office.engine.requests) < 3:
                await asyncio.sleep(0)
        cancelling = await ingress.ai.batches.cancel(begun.id)
        assert cancelling.status in ("cancelling", "cancelled") and cancelling.cancelling_at
        batch = await ingress.until(begun, "cancelled")
        assert batch.cancelled_at and all(each.closed for each in office.engine.generations[1:])
        errors = await ingress.read(batch.error_file_id)
        assert {error["error"]["code"] for error in errors.values()} == {"batch_cancelled"}
        answers = {} if batch.output_file_id is None else await ingress.read(batch.output_file_id)
        assert answers.keys() | errors.keys() == {"a", "b", "c"} and len(answers) + len(errors) == 3
        refused = await ingress.http.post(f"/v1/batches/{begun.id}/cancel")
        assert refused.status_code == 400 and "'cancelled'" in refused.json()["error"]["message"]

    office.play(scene)


def test_a_batch_expires(office: Office) -> None:
    async def scene(ingress: Ingress) -> None:
        _hang_after(office.engine, 0)
        begun = await ingress.begin(lines("a", "b"), window="2h")
        await ingress.until(begun, "in_progress")
        office.clock.now += 7200
        ingress.worker.look()
        batch = await ingress.until(begun, "expired")
        assert batch.expired_at and batch.output_file_id is None
        errors = await ingress.read(batch.error_file_id)
        assert {name: error["error"]["code"] for name, error in errors.items()} == {
            "a": "batch_expired", "b": "batch_expired",
        }  # fmt: skip

    office.play(scene)


def test_batches_are_listed_in_pages_and_forgotten_in_time(office: Office) -> None:
    async def scene(ingress: Ingress) -> None:
        begun = []
        for _ in range(3):
            begun.append(await ingress.until(await ingress.begin(lines("a")), "completed"))
            office.clock.now += 10
        first = await ingress.ai.batches.list(limit=2)
        assert [batch.id for batch in first.data] == [begun[2].id, begun[1].id] and first.has_more
        assert [batch.id async for batch in ingress.ai.batches.list(limit=1)] == [each.id for each in begun[::-1]]
        for wrong in ({"limit": 0}, {"limit": 101}, {"limit": "x"}):
            assert (await ingress.http.get("/v1/batches", params=wrong)).status_code == 400
        assert (await ingress.http.get("/v1/batches", params={"after": "batch_1"})).status_code == 404
        await ingress.until(await ingress.begin(lines("a")), "completed")
        assert len((await ingress.ai.batches.list()).data) == 3  # the oldest gave way
        assert (await ingress.http.get(f"/v1/batches/{begun[0].id}")).status_code == 404

    office.play(scene, max_batches=3)


def test_more_batches_than_may_wait_are_refused(office: Office) -> None:
    async def scene(ingress: Ingress) -> None:
        _hang_after(office.engine, 0)
        await ingress.begin(lines("a"))
        file = await ingress.upload(lines("b"))
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        refused = await ingress.http.post("/v1/batches", json=body)
        assert refused.status_code == 400 and "files.max_batches" in refused.json()["error"]["message"]

    office.play(scene, max_batches=1)


def test_a_batch_outlives_its_input_file(office: Office) -> None:
    async def run() -> None:
        ingress = office.ingress()
        begun = await ingress.begin(lines("a"))
        await ingress.ai.files.delete(begun.input_file_id)
        async with ingress.working():
            assert (await ingress.until(begun, "completed")).request_counts.completed == 1

    asyncio.run(run())


def _embedding(office: Office) -> Office:
    """The same with a model that embeds."""
    models = {
        name: replace(served, card=replace(served.card, tasks=("embed",), hidden_size=4))
        for name, served in office.service.models.items()
    }
    return replace(office, service=replace(office.service, models=models))


def _hang_after(engine: ScriptedEngine, count: int) -> None:
    """Have the engine answer as many requests, and no more."""
    generate = engine.generate

    async def hang(request: Any, turn: Any = None) -> Any:
        engine.hangs = len(engine.requests) >= count
        return await generate(request, turn)

    engine.generate = hang  # type: ignore[method-assign]
