"""Pages in files: whole, of the right model, within their bound, whatever others do to the directory."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.kv_tier.page_files import MANIFEST, PageFiles
from tests.support.failing_disk import failing_disk

IDENTITY: dict[str, str | int] = {"model": "a" * 32, "layers": 2}
LAYER = 1000
PAGE = 2 * LAYER


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") * 16


def page(number: int = 0) -> memoryview:
    return memoryview(bytearray([number]) * LAYER + bytearray([number + 1]) * LAYER)


def opened(directory: Path, num_pages: int = 100, **identity: str | int) -> PageFiles:
    return PageFiles(directory, {**IDENTITY, **identity}, [PAGE], num_pages * (PAGE + 100))


def read(files: PageFiles, number: int) -> int | None:
    """Return with which number a page was written; None if it cannot be read."""
    memory = page(99)
    if not files.read(key(number), memory):
        return None
    assert memory == page(memory[0])
    return memory[0]


def test_pages_survive_a_restart(tmp_path: Path) -> None:
    files = opened(tmp_path)
    for number in range(5):
        files.write(key(number), page(number))
    assert [read(opened(tmp_path), number) for number in range(6)] == [0, 1, 2, 3, 4, None]
    assert len(opened(tmp_path)) == 5 and opened(tmp_path).num_bytes == files.num_bytes


def test_calls_that_move_only_a_part_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call may move fewer bytes than wanted, and ends anywhere: in the header, the page or its blocks."""
    calls: list[str] = []

    def note_parts(name: str, call: Callable[[int, list[memoryview]], int]) -> None:
        def move_part(fd: int, parts: list[memoryview]) -> int:
            calls.append(name)
            return call(fd, [parts[0][:7]])

        monkeypatch.setattr(os, name, move_part)

    note_parts("writev", os.writev)
    note_parts("readv", os.readv)
    files = opened(tmp_path)
    files.write(key(0), page(5), (1, 2, 3))
    assert read(files, 0) == 5
    assert min(calls.count("writev"), calls.count("readv")) > PAGE / 7


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def of_another_page(path: Path) -> None:
    other = path.parent.parent / "00" / f"{key(1).hex()}.kv"
    path.write_bytes(other.read_bytes())


def foreign(path: Path) -> None:
    path.write_bytes(b"\x00" * path.stat().st_size)


@pytest.mark.parametrize("spoil", [cut, emptied, flipped, longer, of_another_page, foreign])
def test_files_that_differ_from_the_written_ones_are_not_read(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    files = opened(tmp_path)
    for number in (1, 2):
        files.write(key(number), page(number))
    path = tmp_path / "00" / f"{key(2).hex()}.kv"
    spoil(path)
    assert read(opened(tmp_path), 2) is None
    assert read(files, 2) is None and not files.has(key(2)) and not path.exists()
    files.write(key(2), page(2))
    assert (read(files, 1), read(files, 2)) == (1, 2)


def test_files_with_foreign_names_are_not_touched(tmp_path: Path) -> None:
    """Folders and files that look nearly like pages: neither a stop nor a page, at the start and later."""
    files = opened(tmp_path)
    files.write(key(1), page(1))
    for name in ("zz/x.kv", "00/.kv", "00/ab.kv", "00/zz.kv", "01/" + key(1).hex() + ".kv", "é1/x"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"somebody's")
    files.scan()
    for found in (files, opened(tmp_path)):
        assert len(found) == 1 and read(found, 1) == 1
    assert (tmp_path / "zz" / "x.kv").exists() and (tmp_path / "00" / "ab.kv").exists()


def test_forgotten_pages_are_deleted_later(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.write(key(1), page(1))
    forgotten = files.forget_all()
    assert not files.has(key(1)) and len(list(tmp_path.glob("*/*.kv"))) == 1
    for one in forgotten:
        files.delete(one)
    assert not list(tmp_path.glob("*/*.kv"))


def test_a_file_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.write(key(1), page(1))
    (tmp_path / "00" / f"{key(1).hex()}.kv").unlink()
    assert files.has(key(1))
    assert read(files, 1) is None and not files.has(key(1)) and files.num_bytes == 0


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    files = opened(tmp_path, num_pages=4)
    for number in range(4):
        files.write(key(number), page(number))
    read(files, 0)
    files.write(key(4), page(4))
    assert [files.has(key(number)) for number in range(5)] == [True, False, True, True, True]
    assert len(list(tmp_path.glob("*/*.kv"))) == 4
    for number, used_at in ((0, 30), (2, 10), (3, 40), (4, 20)):
        os.utime(tmp_path / "00" / f"{key(number).hex()}.kv", (used_at, used_at))
    smaller = opened(tmp_path, num_pages=2)
    assert [smaller.has(key(number)) for number in (0, 2, 3, 4)] == [True, False, True, False]


def test_engines_that_share_a_directory_find_each_others_pages(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    one.write(key(1), page(1))
    assert not other.has(key(1))
    other.scan()
    assert other.has(key(1)) and read(other, 1) == 1
    for each in one.forget_all():
        one.delete(each)
    time.sleep(0.01)  # for a time stamp that differs
    other.scan()
    assert len(other) == 0 and other.num_bytes == 0


def held(files: PageFiles) -> set[int]:
    """Return the blocks of which routers are told."""
    files.log.drain()
    return set(files.log.snapshot())


def test_every_block_in_the_files_is_reported_to_routers(tmp_path: Path) -> None:
    files = opened(tmp_path, num_pages=4)
    for number in range(4):
        files.write(key(number), page(number), (2 * number, 2 * number + 1, 2**64 - 1 - number))
    assert held(files) == {*range(8), *range(2**64 - 4, 2**64)}
    files.delete(key(2))
    assert held(files) == {0, 1, 2, 3, 6, 7, *(2**64 - 1 - number for number in (0, 1, 3))}
    for number in (4, 5):  # for whose room the oldest goes
        files.write(key(number), page(number), (2 * number, 2 * number + 1))
    assert {0, 1}.isdisjoint(held(files)) and {8, 9, 10, 11} <= held(files)
    files.forget_all()
    assert held(files) == set()


def test_pages_that_others_have_written_are_reported_newest_first(tmp_path: Path) -> None:
    files = opened(tmp_path)
    for number in range(5):
        files.write(key(number), page(number), (10 * number,))
        os.utime(tmp_path / "00" / f"{key(number).hex()}.kv", (number, number))
    later = opened(tmp_path)
    assert held(later) == set()
    assert later.learn_blocks(2) and held(later) == {30, 40}
    assert read(later, 0) == 0 and held(later) == {0, 30, 40}, "who reads a page need not look again"
    assert not later.learn_blocks(10) and held(later) == {0, 10, 20, 30, 40}
    files.write(key(7), page(7), (70,))
    later.scan()
    later.learn_blocks(10)
    assert 70 in held(later)


@pytest.mark.parametrize("spoil", [cut, emptied, longer])
def test_a_file_without_whole_blocks_is_not_reported(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    opened(tmp_path).write(key(1), page(1), (1, 2))
    spoil(tmp_path / "00" / f"{key(1).hex()}.kv")
    files = opened(tmp_path)
    files.learn_blocks(10)
    assert held(files) == set()


def test_a_directory_that_many_open_together_has_one_name(tmp_path: Path) -> None:
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.append(opened(tmp_path).name)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) == 8 and len(set(names)) == 1 == len(list(tmp_path.iterdir()))
    (other := tmp_path / "other").mkdir()
    assert opened(other).name != names[0]


def test_concurrent_writers_read_only_pages_that_were_written(tmp_path: Path) -> None:
    """Several engines write, read and delete the same pages: nobody reads anything but what was written."""
    engines, wrong = [opened(tmp_path, num_pages=6) for _ in range(3)], []

    def work(files: PageFiles, seed: int) -> None:
        for turn in range(200):
            number = (turn * 7 + seed) % 10
            if turn % 3:
                if read(files, number) not in (None, number):
                    wrong.append(number)
            else:
                files.write(key(number), page(number))
            if turn % 50 == 0:
                files.scan()

    threads = [threading.Thread(target=work, args=(files, seed)) for seed, files in enumerate(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not list(tmp_path.glob("**/*.part"))


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path)
    real = os.writev

    def full(fd: int, buffers: list[memoryview]) -> int:
        real(fd, buffers[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        files.write(key(1), page(1))
    assert not list(tmp_path.glob("*/*")) and not files.has(key(1)) and files.num_bytes == 0


def test_the_unfinished_file_of_a_killed_engine_is_deleted_once_it_is_old(tmp_path: Path) -> None:
    opened(tmp_path).write(key(1), page(1))
    old, new = tmp_path / "00" / "1-2-3.part", tmp_path / "00" / "4-5-6.part"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    assert len(opened(tmp_path)) == 1
    assert not old.exists() and new.exists()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.rmdir(), "is not a directory: create it"),
        (lambda path: (path.rmdir(), path.write_text("x")), "is not a directory: create it"),
        (lambda path: (path / MANIFEST).write_text("{"), "no JSON"),
        (lambda path: (path / MANIFEST).write_text("[]"), "no JSON object"),
        (lambda path: opened(path, model="b" * 32), "model 'bbbb.* instead of 'aaaa.*give each a directory"),
        (lambda path: opened(path, layers=3), "layers 3 instead of 2"),
        (
            lambda path: (path / MANIFEST).write_text(json.dumps({**IDENTITY, "format": 0})),
            "format 0 instead of 2",
        ),
    ],
)
def test_directories_that_cannot_be_used(tmp_path: Path, spoil: Callable[[Path], object], words: str) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    spoil(directory)
    with pytest.raises(ValueError, match=r"kv_tier\.directory is .*" + words):
        opened(directory)


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EROFS, "must be able to read and write there"), (errno.ENOSPC, "its disk is full: make room")],
)
def test_a_directory_that_cannot_be_written(tmp_path: Path, number: int, words: str) -> None:
    """A superuser may write anywhere, so the system's answer is scripted."""
    with failing_disk(tmp_path, number), pytest.raises(ValueError, match=words):
        opened(tmp_path)


def test_a_fifo_instead_of_a_page_holds_up_no_reader(tmp_path: Path) -> None:
    """A FIFO in place of a page, under its name or one that is being written, and one in place of the manifest."""
    files = opened(tmp_path)
    files.write(key(1), page(1))
    (path,) = tmp_path.glob("*/*.kv")
    path.unlink()
    os.mkfifo(path)
    assert read(files, 1) is None
    assert read(opened(tmp_path), 1) is None
    (tmp_path / MANIFEST).unlink()
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(ValueError, match="is a FIFO, and a regular file was expected"):
        opened(tmp_path)


def test_pages_can_be_read_by_the_servers_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = opened(tmp_path)
        files.write(key(1), page(1))
    finally:
        os.umask(before)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o600}
