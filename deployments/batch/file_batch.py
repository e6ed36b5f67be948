"""Runs a file of requests to its end: requests without a good answer are sent, and the answers are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from deployments.batch.in_thread import in_thread
from deployments.batch.input_file import BatchFile, InvalidLine
from deployments.batch.output_file import PartialOutput, output_line
from deployments.batch.runner import BatchCall, BatchRunner


@dataclass(slots=True)
class BatchProgress:
    """The progress of a batch."""

    total: int
    """Lines of the input."""
    num_ok: int
    """Requests that were answered, including those of earlier runs."""
    num_failed: int
    """Lines that are no requests, and requests whose answer is an error, in this run."""

    @property
    def num_done(self) -> int:
        """Number of lines that are finished in this run."""
        return self.num_ok + self.num_failed


async def run_file_batch(
    batch: BatchFile,
    output: PartialOutput,
    runner: BatchRunner,
    fields: Mapping[str, Any],
    on_progress: Callable[[BatchProgress], None],
) -> BatchProgress:
    """Send the remaining requests of `batch` and write the output. Raises BatchFileError or BatchStopped.

    `fields` are added to bodies that lack them. If this ends early for any reason, all added answers stay.
    """
    progress = await answer_rest(batch, output, runner, fields, on_progress)
    output.finish()
    return progress


async def answer_rest(
    batch: BatchFile,
    output: PartialOutput,
    runner: BatchRunner,
    fields: Mapping[str, Any],
    on_progress: Callable[[BatchProgress], None],
    reserve: Callable[[int], None] = lambda num_bytes: None,
) -> BatchProgress:
    """Send the remaining requests of `batch`, and add the answers to the partial output; `reserve` makes room.

    Files are read and written in threads, because a server also does this, next to its streams.
    """
    progress = BatchProgress(batch.num_lines, output.num_ok, batch.num_invalid)
    on_progress(progress)
    calls = _calls(batch, output, fields)
    async with aclosing(runner.run(calls, reads_in_thread=True)) as answers:
        async for replies in answers:
            lines = [output_line(call.key, reply) for call, reply in replies]
            await in_thread(output.add, lines, reserve)
            num_ok = sum(line.is_ok for line in lines)
            progress.num_ok += num_ok
            progress.num_failed += len(lines) - num_ok
            on_progress(progress)
    return progress


def _calls(batch: BatchFile, output: PartialOutput, fields: Mapping[str, Any]) -> Iterator[BatchCall[str]]:
    for index, line in enumerate(batch):
        if not isinstance(line, InvalidLine) and not output.is_ok(index):
            yield BatchCall(line.custom_id, line.url, line.with_fields(fields))
