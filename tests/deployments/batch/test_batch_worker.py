"""Batches in a spool: each has one owner at a time, and whoever dies is followed by another where it stopped."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deployments.batch import batch_worker
from deployments.batch.batch_worker import BatchWorker
from deployments.batch.runner import Reply
from deployments.batch.spool import Spool
from deployments.batch.stored_batches import BatchRecord, StoredBatches, new_batch_id
from deployments.batch.stored_files import StoredFiles
from deployments.config.files import FileSettings
from deployments.config.settings import BatchSettings
from tests.deployments.batch.support.batch_files import URL, Shuffling, request_line

NAMES = [f"r{number}" for number in range(12)]
PATIENCE_S = 60.0


class Desk:
    """A spool, and what one tenant does there."""

    def __init__(self, root: Path, tenant: str = "t") -> None:
        self.settings = FileSettings(directory=str(root / "spool"), poll_s=0.01)
        self.spool = Spool(self.settings)
        self.root, self.tenant = root, tenant
        self.folder = self.spool.of(tenant)
        self.batches, self.files = StoredBatches(self.folder), StoredFiles(self.folder)

    def of(self, tenant: str) -> Desk:
        """Another tenant's desk in the same spool."""
        return Desk(self.root, tenant)

    def leave(self, names: list[str] = NAMES, **fields: Any) -> str:
        """Leave a batch; return its name."""
        upload = self.files.begin()
        upload.write("\n".join(map(request_line, names)).encode())
        file = self.files.keep(upload, "in.jsonl", "batch", None)
        upload.close()
        now = int(self.spool.clock())
        record = BatchRecord(new_batch_id(), self.tenant, URL, file.id, "24h", now, now + 86_400, **fields)
        self.batches.create(record, self.files.content(file.id))
        return record.id

    def find(self, name: str) -> BatchRecord:
        found = self.batches.find(name)
        assert found is not None
        return found

    def place(self, name: str) -> Path:
        return self.folder.batches / name

    @contextlib.asynccontextmanager
    async def worker(self, api: Any) -> AsyncIterator[BatchWorker]:
        """Work on the batches, as a process of its own does: with a spool of its own."""
        worker = BatchWorker(
            Spool(self.settings), BatchSettings(max_in_flight=4, max_attempts=1), lambda tenant: api.post, 10_000
        )
        worker.start()
        try:
            yield worker
        finally:
            await worker.aclose()

    async def until_ended(self, *names: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not all(self.find(name).has_ended for name in names):
                await asyncio.sleep(0.005)

    def answers(self, name: str) -> dict[str, str]:
        """What was answered to each request of an ended batch."""
        file_id = self.find(name).output_file_id
        assert file_id is not None
        lines = [json.loads(line) for line in self.files.content(file_id).read_text().splitlines()]
        return {line["custom_id"]: line["response"]["body"]["text"] for line in lines}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_batch_whose_process_was_killed_resumes_where_its_answers_end(desk: Desk) -> None:
    name = desk.leave()
    program = [sys.executable, "-m", "tests.deployments.batch.support.worker_process"]
    process = subprocess.Popen([*program, str(desk.settings.directory), "7"])
    partial = desk.place(name) / "answers.jsonl.partial"
    deadline = time.monotonic() + PATIENCE_S
    while not partial.exists() or partial.read_bytes().count(b"\n") < 8:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    assert desk.batches.claim(name) is None  # it is another's, as long as that lives
    process.kill()
    process.wait()
    kept = {json.loads(line)["custom_id"] for line in partial.read_text().splitlines()[1:]}
    api = Shuffling()

    async def resume_batch() -> None:
        async with desk.worker(api):
            await desk.until_ended(name)

    asyncio.run(resume_batch())
    assert len(kept) == 7 and set(api.prompts) == set(NAMES) - kept
    assert list(desk.answers(name)) == NAMES and desk.find(name).status == "completed"
    assert sorted(path.name for path in desk.place(name).iterdir()) == ["lock", "state.json"]


def test_several_processes_share_the_work_and_send_nothing_twice(desk: Desk) -> None:
    names = [desk.leave([f"{batch}-{number}" for number in range(6)]) for batch in range(8)]
    apis = [Shuffling(seed) for seed in range(3)]

    async def work() -> None:
        async with desk.worker(apis[0]), desk.worker(apis[1]), desk.worker(apis[2]):
            await desk.until_ended(*names)

    asyncio.run(work())
    sent = Counter(prompt for api in apis for prompt in api.prompts)
    assert set(sent.values()) == {1} and len(sent) == 48
    for batch, name in enumerate(names):
        assert list(desk.answers(name)) == [f"{batch}-{number}" for number in range(6)]


def test_a_worker_that_is_closed_leaves_its_batches_to_the_next(desk: Desk) -> None:
    name, api = desk.leave(), Shuffling()
    reached = asyncio.Event()

    class Slow(Shuffling):
        async def post(self, url: str, body: bytes) -> Reply:
            if len(self.bodies) == 6:
                reached.set()
                await asyncio.Event().wait()
            return await super().post(url, body)

    async def work() -> None:
        async with desk.worker(Slow()):
            await asyncio.wait_for(reached.wait(), PATIENCE_S)
        assert desk.find(name).status == "in_progress"
        async with desk.worker(api):
            await desk.until_ended(name)

    asyncio.run(work())
    assert list(desk.answers(name)) == NAMES and len(api.prompts) < 12


@pytest.mark.parametrize("status", ["in_progress", "finalizing"])
def test_a_batch_is_finished_once_wherever_its_process_died(desk: Desk, status: str) -> None:
    """A process died after it had written the record and the answers, and before all that follows."""
    name = desk.leave()

    async def work() -> None:
        async with desk.worker(Shuffling()):
            await desk.until_ended(name)

    state = desk.place(name) / "state.json"
    asyncio.run(work())
    first = desk.find(name)
    content = desk.files.content(str(first.output_file_id)).read_bytes()
    again = desk.leave()
    died = desk.find(again)
    died.status, died.outcome = status, "completed" if status == "finalizing" else None
    died.output_file_id, died.error_file_id = "file-" + "a" * 32, "file-" + "b" * 32
    (desk.place(again) / "state.json").write_bytes(json.dumps(msgspec.to_builtins(died)).encode())
    head, *lines = content.splitlines(keepends=True)
    sha256 = hashlib.sha256((desk.place(again) / "input.jsonl").read_bytes()).hexdigest()
    fingerprint = json.dumps({"input_sha256": sha256}, separators=(",", ":"))
    (desk.place(again) / "answers.jsonl.partial").write_bytes(f"{fingerprint}\n".encode() + head + b"".join(lines))
    asyncio.run(_finish(desk, again))
    assert list(desk.answers(again)) == NAMES and desk.find(again).status == "completed"
    if status == "finalizing":
        assert desk.find(again).output_file_id == "file-" + "a" * 32
    assert state.exists()


async def _finish(desk: Desk, name: str) -> None:
    async with desk.worker(Shuffling()):
        await desk.until_ended(name)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b'{"id": 7}', b"[" * 100_000, b'{"id": "batch_x", "tenant": "t"}']
)
def test_a_file_that_is_no_record_is_skipped(desk: Desk, content: bytes) -> None:
    name, foreign = desk.leave(), new_batch_id()
    desk.place(foreign).mkdir()
    (desk.place(foreign) / "state.json").write_bytes(content)
    (desk.folder.batches / "notes.txt").write_text("mine")
    (desk.folder.files / "file-x").mkdir()
    (desk.folder.path.parent / "lost+found").mkdir()
    (desk.folder.path.parent / "README").write_text("x")
    asyncio.run(_finish(desk, name))
    assert desk.batches.find(foreign) is None and [record.id for record in desk.batches.all()] == [name]
    assert desk.files.all() and (desk.folder.batches / "notes.txt").exists()


def test_a_spoilt_file_of_answers_ends_the_batch_with_a_reason(desk: Desk) -> None:
    name = desk.leave(status="in_progress")
    (desk.place(name) / "answers.jsonl.partial").write_text('{"input_sha256":"of another"}\n')
    asyncio.run(_finish(desk, name))
    found = desk.find(name)
    assert found.status == "failed" and "cannot be read" in found.errors[0].message
    assert str(desk.settings.directory) not in found.errors[0].message


class Held(Shuffling):
    """Answers no request of some tenants, whose names they begin with, until it is told to."""

    def __init__(self, *tenants: str) -> None:
        super().__init__()
        self._tenants, self.answers = tenants, asyncio.Event()

    async def post(self, url: str, body: bytes) -> Reply:
        if json.loads(body)["prompt"].startswith(self._tenants):
            await self.answers.wait()
        return await super().post(url, body)


def lines(tenant: str, batch: int, count: int) -> list[str]:
    return [f"{tenant}{batch}-{number}" for number in range(count)]


@pytest.mark.parametrize("num_places", [2, 4])
def test_a_tenants_batch_is_answered_while_anothers_batches_have_all_places(desk: Desk, num_places: int) -> None:
    """The other's requests take for ever. In the end each of them was sent once."""
    mine = [desk.leave(lines("t", batch, 30)) for batch in range(num_places + 2)]
    desk.settings = desk.settings.model_copy(update={"max_running": num_places})
    other = desk.of("u")

    async def work() -> list[str]:
        api = Held("t")
        async with desk.worker(api):
            while sum(desk.find(name).status == "in_progress" for name in mine) < num_places:
                await asyncio.sleep(0.005)
            for batch in range(3):  # one after the other
                await other.until_ended(other.leave(lines("u", batch, 30)))
            assert not any(desk.find(name).has_ended for name in mine)
            api.answers.set()
            await desk.until_ended(*mine)
        return api.prompts

    sent = Counter(asyncio.run(work()))
    assert set(sent.values()) == {1} and len(sent) == 30 * (num_places + 5)
    for batch, name in enumerate(mine):
        assert list(desk.answers(name)) == lines("t", batch, 30)


def test_tenants_share_the_places_and_none_takes_a_place_from_one_that_has_fewer(desk: Desk) -> None:
    mine = [desk.leave(lines("t", batch, 9)) for batch in range(6)]
    other = desk.of("u")

    def num_begun(desk: Desk, names: list[str]) -> int:
        return sum(desk.find(name).status == "in_progress" for name in names)

    async def work() -> None:
        api = Held("t", "u")
        async with desk.worker(api):
            while num_begun(desk, mine) < 4:
                await asyncio.sleep(0.005)
            theirs = [other.leave(lines("u", batch, 9)) for batch in range(6)]
            while num_begun(other, theirs) < 2:
                await asyncio.sleep(0.005)
            for _ in range(10):
                await asyncio.sleep(0.01)  # it looks again
                assert num_begun(other, theirs) == 2 and num_begun(desk, mine) == 4
            api.answers.set()
            await desk.until_ended(*mine)
            await other.until_ended(*theirs)

    asyncio.run(work())


def test_more_tenants_than_places_take_turns(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """One place: the first tenant's batch takes for ever, and the others' are answered meanwhile."""
    monkeypatch.setattr(batch_worker, "TURN_S", 0.0)
    desk.settings = desk.settings.model_copy(update={"max_running": 1})
    mine = desk.leave(lines("t", 0, 30))
    others = {tenant: desk.of(tenant) for tenant in ("u", "v", "w")}

    async def work() -> None:
        api = Held("t")
        async with desk.worker(api):
            while desk.find(mine).status == "validating":
                await asyncio.sleep(0.005)
            left = {tenant: other.leave(lines(tenant, 0, 5)) for tenant, other in others.items()}
            for tenant, other in others.items():
                await other.until_ended(left[tenant])
            api.answers.set()
            await desk.until_ended(mine)

    asyncio.run(work())
    assert list(desk.answers(mine)) == lines("t", 0, 30)
