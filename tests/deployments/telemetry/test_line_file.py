"""Lines go to a file or a pipe together, in order; a reader that is slow or gone costs lines, and never time."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from deployments.telemetry.line_file import BATCH_S, MAX_WAITING, LineFile
from tests.deployments.support.virtual_time import run


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_lines_are_appended_together(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("before\n")

    async def scenario() -> None:
        lines = LineFile(str(path))
        lines.add("a")
        lines.add("b")
        assert path.read_text() == "before\n"
        await asyncio.sleep(BATCH_S * 1.01)
        assert path.read_text() == "before\na\nb\n"
        lines.add("c")
        lines.flush()
        assert path.read_text().endswith("b\nc\n")
        lines.close()

    run(scenario())


def test_a_pipe_without_a_reader_loses_lines_until_it_has_one(pipe: Path) -> None:
    async def scenario() -> None:
        lines = LineFile(str(pipe))
        lines.add("lost")
        lines.flush()
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        lines.add("read")
        lines.flush()
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        lines.add("lost as well")
        lines.flush()
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        lines.add("read again")
        lines.flush()
        assert os.read(reader, 100) == b"read again\n"
        os.close(reader)
        lines.close()

    run(scenario())


def test_a_full_pipe_takes_whole_lines_and_the_others_are_counted(pipe: Path) -> None:
    async def scenario() -> None:
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        lines = LineFile(str(pipe))
        for number in range(1000):
            lines.add(f"{number:0199}")
        lines.flush()
        taken = os.read(reader, 2**20).decode().splitlines()
        assert 0 < len(taken) < 1000 and [int(line) for line in taken] == list(range(len(taken)))
        lines.add("next")
        lines.flush()
        assert os.read(reader, 2**20).decode() == f"next\n({1000 - len(taken)} more lines)\n"
        os.close(reader)
        lines.close()

    run(scenario())


def test_so_many_lines_wait_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "lines"

    async def scenario() -> None:
        lines = LineFile(str(path))
        for number in range(MAX_WAITING + 7):
            lines.add(str(number))
        lines.flush()
        assert path.read_text().splitlines()[-2:] == [str(MAX_WAITING - 1), "(7 more lines)"]
        lines.close()

    run(scenario())


def test_a_place_that_does_not_exist_costs_nothing_but_the_lines(tmp_path: Path) -> None:
    async def scenario() -> None:
        lines = LineFile(str(tmp_path / "none" / "lines"))
        lines.add("a")
        lines.flush()

    run(scenario())
