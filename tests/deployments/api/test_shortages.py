"""A full disk, one that fails, and no free descriptor are the operator's: no 500, and nothing counts as kept."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from deployments.api import ApiService, Limits, create_app
from deployments.api.responses.kept import KeptResponses
from deployments.batch.spool import Spool
from deployments.config.files import FileSettings
from deployments.config.settings import ResponseSettings
from deployments.ingress.grammar_check import GrammarCheck
from engine.grammar.vocabulary import Vocabulary
from tests.deployments.support.scripted_api import ScriptedEngine
from tests.support.failing_disk import failing_disk

ASK: dict[str, Any] = {"model": "demo", "input": "Is it raining in Oslo?"}
FULL = {errno.ENOSPC: "disk_full", errno.EDQUOT: "disk_full", errno.EROFS: "disk_read_only"}
BUSY = {errno.EMFILE: "too_many_open_files", errno.ENFILE: "too_many_open_files", errno.EIO: "storage_unavailable"}
Scene = Callable[[httpx.AsyncClient], Awaitable[None]]


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A shortage is a warning of one line, and no defect with a traceback."""
    yield
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


class Disk:
    """A service that keeps responses and files in a directory."""

    def __init__(self, service: ApiService, directory: Path) -> None:
        self.directory = directory
        kept = KeptResponses(ResponseSettings(store=f"file://{directory}/responses"))
        spool = Spool(FileSettings(directory=str(directory / "spool")))
        self.service = replace(service, responses=kept, spool=spool)

    def play(self, scene: Scene) -> None:
        async def run() -> None:
            transport = httpx.ASGITransport(create_app(self.service))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                await scene(http)
                await self.service.responses.aclose()

        asyncio.run(run())


@pytest.fixture
def disk(service: ApiService, tmp_path: Path) -> Disk:
    return Disk(service, tmp_path)


async def upload(http: httpx.AsyncClient) -> httpx.Response:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "a"}}
    content = json.dumps(line).encode()
    return await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})


async def begin(http: httpx.AsyncClient, file: str) -> httpx.Response:
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return await http.post("/v1/batches", json=body)


@pytest.mark.parametrize(("number", "code"), [*FULL.items(), *BUSY.items()])
def test_a_failed_write_is_answered_with_the_reason(disk: Disk, number: int, code: str) -> None:
    async def scene(http: httpx.AsyncClient) -> None:
        conversation = (await http.post("/v1/conversations", json={"items": []})).json()["id"]
        file = (await upload(http)).json()["id"]
        batch = (await begin(http, file)).json()["id"]
        one = f"/v1/conversations/{conversation}"
        item = {"type": "message", "role": "user", "content": "a"}
        with failing_disk(disk.directory, number):
            answers = [
                await http.post("/v1/conversations", json={}),
                await http.post(one, json={"metadata": {"a": "b"}}),
                await http.post(f"{one}/items", json={"items": [item]}),
                await upload(http),
                await begin(http, file),
                await http.post(f"/v1/batches/{batch}/cancel"),
                await http.post("/v1/responses", json=ASK | {"background": True}),
            ]
        for answer in answers:
            assert answer.status_code == (507 if number in FULL else 503), answer.text
            assert answer.json()["error"]["code"] == code
        assert (await http.get(f"{one}/items")).json()["data"] == []
        assert len((await http.get("/v1/files")).json()["data"]) == 1
        assert (await http.get(f"/v1/batches/{batch}")).json()["status"] == "validating"

    disk.play(scene)


@pytest.mark.parametrize(("number", "code"), BUSY.items())
def test_a_failed_read_is_a_503_and_not_a_404(disk: Disk, number: int, code: str) -> None:
    async def scene(http: httpx.AsyncClient) -> None:
        conversation = (await http.post("/v1/conversations", json={"items": []})).json()["id"]
        file = (await upload(http)).json()["id"]
        batch = (await begin(http, file)).json()["id"]
        response = (await http.post("/v1/responses", json=ASK)).json()["id"]
        with failing_disk(disk.directory, number, reads=True):
            answers = [
                await http.get(f"/v1/conversations/{conversation}"),
                await http.get(f"/v1/conversations/{conversation}/items"),
                await http.get(f"/v1/responses/{response}"),
                await http.get(f"/v1/responses/{response}/input_items"),
                await http.post("/v1/responses", json=ASK | {"previous_response_id": response}),
                await http.post("/v1/responses", json=ASK | {"conversation": conversation}),
                await http.delete(f"/v1/responses/{response}"),
                await http.get("/v1/files"),
                await http.get(f"/v1/files/{file}"),
                await http.get(f"/v1/files/{file}/content"),
                await http.get("/v1/batches"),
                await http.get(f"/v1/batches/{batch}"),
            ]
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, code), answer.text
        assert (await http.get(f"/v1/responses/{response}")).status_code == 200

    disk.play(scene)


def test_a_file_that_is_deleted_while_it_is_asked_for_is_a_404(disk: Disk) -> None:
    async def scene(http: httpx.AsyncClient) -> None:
        file = (await upload(http)).json()["id"]
        (content,) = disk.directory.glob("spool/*/files/*/content")
        content.unlink()
        assert (await http.get(f"/v1/files/{file}/content")).status_code == 404

    disk.play(scene)


@pytest.mark.parametrize("number", FULL)
def test_an_answer_that_cannot_be_stored_reports_it(disk: Disk, number: int) -> None:
    async def scene(http: httpx.AsyncClient) -> None:
        conversation = (await http.post("/v1/conversations", json={"items": []})).json()["id"]
        for change in ({}, {"conversation": conversation}):
            expected = (await http.post("/v1/responses", json=ASK | change)).json()
            with failing_disk(disk.directory, number):
                answer = (await http.post("/v1/responses", json=ASK | change)).json()
                stream = (await http.post("/v1/responses", json=ASK | change | {"stream": True})).text
            end = json.loads(stream.split("data: ")[-1])["response"]
            for response in (answer, end):
                assert (response["status"], response["store"]) == ("completed", False)
                assert response["conversation"] is None
                assert response["output"][0]["content"] == expected["output"][0]["content"]
                assert (await http.get(f"/v1/responses/{response['id']}")).status_code == 404
            assert expected["store"] is True
        items = (await http.get(f"/v1/conversations/{conversation}/items")).json()["data"]
        assert len(items) == 2

    disk.play(scene)


def test_a_background_answer_that_cannot_be_stored_has_failed(service: ApiService, engine: ScriptedEngine) -> None:
    """The memory has room for what is queued, and not for the answer."""
    kept = KeptResponses(ResponseSettings(max_bytes=2300))
    engine.says = "word " * 400

    async def scene() -> None:
        transport = httpx.ASGITransport(create_app(replace(service, responses=kept)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            begun = await http.post("/v1/responses", json=ASK | {"background": True})
            assert begun.status_code == 200, begun.text
            while kept.background.num_running:
                await asyncio.sleep(0)
            ended = (await http.get(f"/v1/responses/{begun.json()['id']}")).json()
            assert ended["status"] == "failed" and "could not be stored" in ended["error"]["message"]
            whole = (await http.post("/v1/responses", json=ASK)).json()
            assert (whole["status"], whole["store"]) == ("completed", False)

    asyncio.run(scene())


def test_where_nothing_is_kept_no_answer_claims_to_be_kept(service: ApiService) -> None:
    kept = KeptResponses(ResponseSettings(max_bytes=0))

    async def scene() -> None:
        transport = httpx.ASGITransport(create_app(replace(service, responses=kept)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert (await http.post("/v1/responses", json=ASK)).json()["store"] is False

    asyncio.run(scene())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_grammar_for_which_no_process_can_be_started_is_a_503(
    service: ApiService, number: int, is_stream: bool
) -> None:
    check = GrammarCheck(lambda: Vocabulary("{}", 4096, (2,)), Limits())
    served = replace(service.models["demo"], grammars=check)

    async def scene() -> None:
        transport = httpx.ASGITransport(create_app(replace(service, models={"demo": served})))
        body = {"model": "demo", "prompt": "a", "structured_outputs": {"regex": "a+"}, "stream": is_stream}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            with patch.object(subprocess, "Popen", side_effect=OSError(number, "no")):
                answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] in ("too_many_open_files", "out_of_memory")

    try:
        asyncio.run(scene())
    finally:
        check.close()
