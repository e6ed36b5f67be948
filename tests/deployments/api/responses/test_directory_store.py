"""Records in a directory: bounded, per tenant, shared by processes, and safe from what else lies there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from deployments.api.base.errors import ApiError
from deployments.api.responses.directory_store import RECORD_BYTES, SHARE, DirectoryStore
from tests.deployments.support.forked import forked

SIZE = RECORD_BYTES + 108


def name(number: int) -> str:
    return f"resp_{number:032x}"


class Disk:
    """A directory, and time."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path / "store", 1000.0

    def store(self, max_bytes: int = 100 * SIZE, ttl_s: float = 100.0) -> DirectoryStore:
        return DirectoryStore(self.path, max_bytes, ttl_s, lambda: self.now)

    def files(self) -> list[Path]:
        return [path for path in self.path.rglob("resp_*") if path.is_file()]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scene()

    asyncio.run(run())


async def held(store: DirectoryStore, tenant: str, *numbers: int) -> list[bool]:
    return [record is not None for record in await store.get(tenant, [name(number) for number in numbers])]


def test_a_process_reads_replaces_and_deletes_records_that_another_keeps(disk: Disk) -> None:
    async def scene() -> None:
        one, other = disk.store(), disk.store()
        assert await one.get("t", [name(1)]) == [None] and not await one.delete("t", name(1))
        await one.put("t", name(1), b"first")
        assert await other.get("t", [name(1), name(2)]) == [b"first", None]
        await other.put("t", name(1), b"")
        assert await one.get("t", [name(1)]) == [b""]
        assert await other.get("T", [name(1)]) == [None] and not await other.delete("T", name(1))
        assert await one.delete("t", name(1)) and not await other.delete("t", name(1))
        assert not disk.files()

    play(scene)


@pytest.mark.parametrize("is_used", [False, True])
def test_unused_records_are_forgotten_in_time(disk: Disk, is_used: bool) -> None:
    async def scene() -> None:
        store = disk.store()
        await store.put("t", name(1), b"x" * 100)
        disk.now += 90
        if is_used:
            assert await held(store, "t", 1) == [True]
        disk.now += 60
        await store.put("t", name(2), b"y")
        assert await held(store, "t", 1, 2) == [is_used, True]
        assert len(disk.files()) == 1 + is_used

    play(scene)


def test_a_full_directory_forgets_unused_records_of_the_tenant_with_most(disk: Disk) -> None:
    async def scene() -> None:
        store = disk.store(max_bytes=SHARE * SIZE)
        for number in range(3):
            await store.put("quiet", name(number), b"x" * 100)
        for number in range(50):
            disk.now += 1
            await store.put("loud", name(number), b"x" * 100)
        assert await held(store, "quiet", 0, 1, 2) == [True] * 3
        assert await held(store, "loud", 49, 48, 10, 0) == [True, True, False, False]
        assert sum(path.stat().st_size + RECORD_BYTES for path in disk.files()) <= SHARE * SIZE
        with pytest.raises(ApiError, match="can be stored"):
            await store.put("loud", name(49), b"x" * SHARE * SIZE)
        assert await held(store, "loud", 49) == [True]

    play(scene)


def test_a_truncated_or_foreign_file_does_not_exist(disk: Disk) -> None:
    async def scene() -> None:
        store = disk.store()
        await store.put("t", name(1), b"x" * 100)
        (path,) = disk.files()
        whole = path.read_bytes()
        for cut in (0, 3, 7, 8, 50, len(whole) - 1):
            path.write_bytes(whole[:cut])
            assert await held(store, "t", 1) == [False]
        path.write_bytes(whole[:-1] + b"y")
        assert await held(store, "t", 1) == [False]
        path.unlink()
        path.mkdir()
        (path.parent / "notes.txt").write_text("mine")
        (disk.path / "README").write_text("x")
        assert await held(store, "t", 1) == [False]
        disk.now += 1000
        await store.put("t", name(2), b"y")
        assert await held(store, "t", 2) == [True] and (path.parent / "notes.txt").read_text() == "mine"

    play(scene)


def test_a_record_that_others_forget_while_it_is_written_is_written_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may stand still between writing a record and naming it, until all other records are newer."""
    replaces, put_back = [], Path.replace

    def forgotten_once(path: Path, target: Path) -> Path:
        replaces.append(path)
        if len(replaces) == 1:
            path.unlink()
        return put_back(path, target)

    async def scene() -> None:
        monkeypatch.setattr(Path, "replace", forgotten_once)
        await disk.store().put("t", name(1), b"x")
        assert len(replaces) == 2 and await held(disk.store(), "t", 1) == [True]

    play(scene)


def _hammer(path: Path, seed: int) -> None:
    """Write, read and delete records of a few names; a record says its own name all along."""

    async def run() -> None:
        store, chance = DirectoryStore(path, 40 * SIZE, 1e9), random.Random(seed)
        for _ in range(200):
            number = chance.randrange(60)
            if chance.random() < 0.6:
                await store.put("t", name(number), name(number).encode() * chance.randrange(1, 200))
            elif chance.random() < 0.2:
                await store.delete("t", name(number))
            (record,) = await store.get("t", [name(number)])
            assert record is None or record == name(number).encode() * (len(record) // 37)

    asyncio.run(run())


def test_processes_do_not_get_into_each_others_way(disk: Disk) -> None:
    processes = [forked().Process(target=_hammer, args=(disk.path, seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert not list(disk.path.rglob("*.tmp"))
    sizes = sum(path.stat().st_size + RECORD_BYTES for path in disk.files())
    assert sizes <= 40 * SIZE * (1 + len(processes) / SHARE) + 200 * 37
