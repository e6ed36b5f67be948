"""Records written together are the lines that the handlers would have written one by one."""

from __future__ import annotations

import asyncio
import io
import logging
from functools import partial
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path

import pytest

from deployments.telemetry.log_batches import BATCH_S, MAX_RECORDS, LogBatches
from tests.deployments.support.virtual_time import now, run


@pytest.fixture
def logger() -> logging.Logger:
    made = logging.Logger("batched", logging.INFO)
    made.propagate = False
    return made


def add(batches: LogBatches, message: str, level: int = logging.INFO) -> None:
    batches.add(level, partial(logging.LogRecord, "batched", level, __file__, 1, message, None, None))


def to_stream(logger: logging.Logger) -> io.StringIO:
    stream = io.StringIO()
    logger.addHandler(logging.StreamHandler(stream))
    return stream


def test_serve_s_file_gets_all_lines_in_order_and_rotates(logger: logging.Logger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = RotatingFileHandler(path, maxBytes=400, backupCount=10)
    file.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(MemoryHandler(1, target=file))

    async def scenario() -> None:
        batches = LogBatches(logger)
        for number in range(100):
            add(batches, f"line {number}")
            if number % 10 == 9:
                batches.flush()

    run(scenario())
    files = sorted(tmp_path.iterdir(), key=lambda one: int(one.suffix[1:] or 0), reverse=True)
    lines = [line for one in files for line in one.read_text().splitlines()]
    assert lines == [f"INFO line {number}" for number in range(100)]
    assert len(files) > 1


def test_a_line_waits_no_longer_than_a_moment_and_a_warning_not_at_all(logger: logging.Logger) -> None:
    stream = to_stream(logger)

    async def scenario() -> None:
        batches = LogBatches(logger)
        add(batches, "first")
        assert not stream.getvalue()
        await asyncio.sleep(BATCH_S * 1.01)
        assert stream.getvalue() == "first\n"
        began = now()
        add(batches, "second")
        add(batches, "third", logging.WARNING)
        assert stream.getvalue() == "first\nsecond\nthird\n" and now() == began
        for number in range(MAX_RECORDS):
            add(batches, str(number))
        assert stream.getvalue().endswith(f"\n{MAX_RECORDS - 1}\n")

    run(scenario())


def test_a_line_that_cannot_be_made_costs_no_other(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    stream = to_stream(logger)

    def fail() -> logging.LogRecord:
        raise ValueError("a defect")

    async def scenario() -> None:
        batches = LogBatches(logger)
        add(batches, "before")
        batches.add(logging.INFO, fail)
        add(batches, "after")
        batches.flush()

    run(scenario())
    assert stream.getvalue() == "before\nafter\n" and "a defect" in caplog.text


def test_levels_filters_and_other_handlers_are_what_they_are_without_batches(logger: logging.Logger) -> None:
    class Kept(logging.Handler):
        def __init__(self) -> None:
            super().__init__(logging.WARNING)
            self.messages: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.messages.append(record.getMessage())

    stream, kept = to_stream(logger), Kept()
    logger.handlers[0].addFilter(lambda record: "hidden" not in record.getMessage())
    logger.addHandler(kept)

    async def scenario() -> None:
        batches = LogBatches(logger)
        for message, level in (("a", 20), ("hidden", 30), ("b", 30), ("unseen", 10)):
            add(batches, message, level)
        batches.flush()

    run(scenario())
    assert stream.getvalue() == "a\nb\n" and kept.messages == ["hidden", "b"]
