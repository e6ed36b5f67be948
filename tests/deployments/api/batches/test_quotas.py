"""What a tenant may keep is taken before it is written, so that those who come at once do not take it twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from deployments.batch.spool import Spool
from tests.deployments.api.batches.conftest import (
    CHAT,
    END,
    FORM,
    PATIENCE_S,
    PURPOSE,
    Ingress,
    Office,
    lines,
    part,
)


def on_disk(office: Office) -> int:
    """Bytes that are written, not those that are reserved: the least of three looks, as files go meanwhile."""
    return min(_seen(office) for _ in range(3))


def _seen(office: Office) -> int:
    found = dict[int, int]()
    for folder, _, names in os.walk(office.directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                each = os.stat(os.path.join(folder, name))
                found[each.st_ino] = min(each.st_size, each.st_blocks * 512)
    return sum(found.values())


def test_concurrent_uploads_take_no_more_than_the_quota(office: Office) -> None:
    """Twenty files of 300 kB, half of them of unknown length, where 1 MB may be kept."""
    peak = 0

    async def scene(ingress: Ingress) -> None:
        nonlocal peak
        body = PURPOSE + part("file", b"x" * 300_000, "a") + END

        async def slowly() -> AsyncIterator[bytes]:
            nonlocal peak
            for start in range(0, len(body), 50_000):
                yield body[start : start + 50_000]
                peak = max(peak, on_disk(office))
                await asyncio.sleep(0)

        async def send(number: int) -> httpx.Response:
            length = {"content-length": str(len(body))} if number % 2 else {}
            return await ingress.http.post("/v1/files", content=slowly(), headers=FORM | length)

        answers = await asyncio.gather(*map(send, range(20)))
        assert {answer.status_code for answer in answers} == {200, 400}
        refused = [answer.json()["error"] for answer in answers if answer.status_code == 400]
        assert {error["code"] for error in refused} == {"storage_full"}
        assert 1 <= len(answers) - len(refused) <= 3
        assert len((await ingress.ai.files.list()).data) == len(answers) - len(refused)
        peak = max(peak, on_disk(office))

    office.play(scene, max_total_bytes=1_000_000)
    assert 300_000 <= peak <= 1_000_000


def test_concurrent_uploads_make_no_more_files_than_allowed(office: Office) -> None:
    async def scene(ingress: Ingress) -> None:
        made = await asyncio.gather(*(ingress.upload(b"x") for _ in range(12)), return_exceptions=True)
        kept = (await ingress.ai.files.list()).data
        assert len(kept) == sum(not isinstance(each, Exception) for each in made) <= 5

    office.play(scene, max_files=5)


def test_concurrent_calls_make_no_more_batches_than_allowed(office: Office) -> None:
    office.engine.hangs = True

    async def scene(ingress: Ingress) -> None:
        file = await ingress.upload(lines("a"))
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        answers = await asyncio.gather(*(ingress.http.post("/v1/batches", json=body) for _ in range(25)))
        assert sorted(answer.status_code for answer in answers) == [200] * 10 + [400] * 15
        assert {answer.json()["error"]["code"] for answer in answers if answer.status_code == 400} == {
            "storage_full"
        }

    office.play(scene, max_batches=10)


def test_a_batch_whose_answers_find_no_room_waits_for_it(office: Office) -> None:
    """Its answers, and the files that they become, count. It says why it waits, and goes on when there is room."""
    office.engine.says = "word " * 60
    most = 60_000

    async def scene(ingress: Ingress) -> None:
        names = [f"request-{number}" for number in range(30)]
        other = await ingress.upload(b"x" * 20_000)
        batch = await ingress.begin(lines(*names))
        async with asyncio.timeout(60):
            while not (found := await ingress.ai.batches.retrieve(batch.id)).errors:
                await asyncio.sleep(0.005)
        (problem,) = found.errors.data or []
        assert (found.status, problem.code) == ("in_progress", "storage_full")
        assert "files.max_total_bytes" in str(problem.message)
        assert on_disk(office) <= most
        num_asked = len(office.engine.requests)
        await asyncio.sleep(0.1)
        assert len(office.engine.requests) <= num_asked + 4, "no answers are made that nobody can keep"
        await ingress.ai.files.delete(other.id)
        ingress.spool.settings.__dict__["max_total_bytes"] = 10**6
        ended = await ingress.until(batch, "completed")
        assert ended.errors is None and len(await ingress.read(ended.output_file_id)) == 30

    office.play(scene, max_total_bytes=most)


def _written(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size if path.is_file() else 0
    return found


def test_room_is_given_back_when_a_batch_has_ended(office: Office) -> None:
    async def scene(ingress: Ingress) -> None:
        batch = await ingress.until(await ingress.begin(lines("a", "b")), "completed")
        assert batch.output_file_id
        folder = next(iter(Spool(office.settings).folders()))
        async with asyncio.timeout(PATIENCE_S):  # it goes on to clear up when it is said to be complete
            while folder.num_bytes() != _written(folder.path):
                await asyncio.sleep(0.005)

    office.play(scene)
