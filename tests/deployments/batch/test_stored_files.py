"""Uploads in a spool: a sweep takes those of dead processes, and none that has just begun."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.batch import spool
from deployments.batch.spool import Spool, entries, lock
from deployments.batch.stored_files import StoredFiles
from deployments.config.files import FileSettings


@pytest.mark.parametrize("is_deleted", [False, True])
def test_an_upload_that_a_sweep_sees_before_it_is_locked_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    """The sweep of another process has the lock of the new file first, or has deleted it."""
    folder = Spool(FileSettings(directory=str(tmp_path / "spool"))).of("t")
    files, held = StoredFiles(folder), []

    def sweep() -> None:
        if is_deleted:
            files.sweep()
        else:
            held.append(lock(entries(folder.uploads)[0]))

    monkeypatch.setattr(spool, "fcntl", _Locks(before_the_first=sweep))
    upload = files.begin()
    upload.write(b"text")
    assert files.keep(upload, "in.jsonl", "batch", None).bytes == 4
    assert len(held) == (not is_deleted)


class _Locks(SimpleNamespace):
    """Locks, before the first of which something else happens."""

    def __init__(self, before_the_first: Callable[[], None]) -> None:
        super().__init__(LOCK_EX=fcntl.LOCK_EX, LOCK_NB=fcntl.LOCK_NB)
        self._before: Callable[[], None] | None = before_the_first

    def flock(self, file: int, operation: int) -> None:
        before, self._before = self._before, None
        if before is not None:
            before()
        fcntl.flock(file, operation)
