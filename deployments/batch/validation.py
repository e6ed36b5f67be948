"""Checks whether a file can be a batch: every problem is found before any of its requests is sent."""

from __future__ import annotations

from pathlib import Path

from deployments.batch.input_file import InvalidLine, read_lines
from deployments.batch.stored_batches import LineProblem
from engine.base.files import open_regular

MOST_PROBLEMS = 100
"""Most problems that are reported for one file."""


def find_problems(path: Path, endpoint: str, max_requests: int, max_line_bytes: int) -> list[LineProblem]:
    """Return the problems of a file, each with its line. Takes time, so it is called in a thread.

    Raises OSError when the file cannot be read.
    """
    problems: list[LineProblem] = []
    first_lines: dict[str, int] = {}
    num_requests = 0
    with open_regular(path) as file:
        for number, line in read_lines(file, max_line_bytes):
            num_requests += 1
            if num_requests > max_requests:
                message = (
                    f"The file has more than {max_requests} requests (files.max_requests); send several batches."
                )
                problems.append(LineProblem("too_many_requests", message, line=number))
                break
            if isinstance(line, InvalidLine):
                problems.append(LineProblem(line.code, line.message, line.param, number))
            elif line.url != endpoint:
                message = f"url is {line.url!r}, but the batch's endpoint is {endpoint!r}; all must be the same."
                problems.append(LineProblem("mismatched_endpoint", message, "url", number))
            if line.custom_id is not None:
                before = first_lines.setdefault(line.custom_id, number)
                if before != number:
                    message = f"custom_id {line.custom_id[:128]!r} is in line {before} too; make them differ."
                    problems.append(LineProblem("duplicate_custom_id", message, "custom_id", number))
            if len(problems) >= MOST_PROBLEMS:
                break
    if not num_requests:
        problems.append(LineProblem("empty_file", "The file has no requests."))
    return problems
