"""Files of others are opened without waiting, if they are files; files of ours are only ours to read."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.base.files import (
    NotRegular,
    TooLarge,
    checked,
    make_folder,
    new_file,
    open_or_create,
    open_regular,
    read_bytes,
)


def no_file(kind: str, place: Path) -> Path:
    """Something that is no regular file."""
    path = place / "it"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "character device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    return path


@pytest.mark.parametrize("kind", ["FIFO", "directory", "character device"])
@pytest.mark.parametrize("read", [open_regular, checked, lambda path: read_bytes(path, 10)])
def test_anything_but_a_regular_file_is_refused_immediately(
    kind: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(NotRegular, match=f"is a {kind}, and a regular file was expected"):
        read(no_file(kind, tmp_path))


@pytest.mark.parametrize("open_it", [new_file, open_or_create])
@pytest.mark.parametrize("kind", ["FIFO", "directory", "socket"])
def test_nothing_is_written_to_anything_but_a_regular_file(
    kind: str, open_it: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(OSError):
        open_it(no_file(kind, tmp_path))


def test_a_link_to_a_file_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link", 3) == b"abc"
    with pytest.raises(TooLarge, match="more than 2 bytes"):
        read_bytes(tmp_path / "link", 2)
    with pytest.raises(TooLarge, match="more than 2 bytes"):
        checked(tmp_path / "link", 2)


def test_created_files_and_folders_are_this_users_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(tmp_path / "a" / "b")
        new_file(tmp_path / "a" / "b" / "new").close()
        open_or_create(tmp_path / "a" / "b" / "lock").close()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
    assert modes == {"b": 0o700, "new": 0o600, "lock": 0o600}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
