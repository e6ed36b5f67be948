"""Runs the `raydix` command in this process, in which what it imports is there already."""

from __future__ import annotations

import contextlib
import io
import subprocess

import pytest

from deployments.cli import main


def raydix(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Return how the command ended, and what it has written, as if it were a process of its own.

    Its input and its output are pipes.
    """
    output, errors = io.StringIO(), io.StringIO()
    code: int | str | None = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        patch.setattr("sys.argv", ["raydix", *arguments])
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        patch.delenv("RAYDIX_API_KEY", raising=False)
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert code is None or isinstance(code, int), code
    return subprocess.CompletedProcess(["raydix", *arguments], code or 0, output.getvalue(), errors.getvalue())
