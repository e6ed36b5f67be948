"""Builds Raydix's source distribution and its wheel, as `make dist` does, from a copy of what git has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked(*folders: str) -> list[str]:
    """Return the paths of files that are, or will be, in the repository: all, or those below folders."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def source_distribution(folder: Path) -> Path:
    """Return the source distribution of a checkout, which is copied to and built in a folder."""
    checkout = folder / "checkout"
    _copy(tracked(), checkout)
    _setup(checkout, "sdist", {})
    (made,) = (checkout / "dist").iterdir()
    return made


def wheel_of(archive: Path, folder: Path, compiler: str) -> Path:
    """Return the wheel of a source distribution, which is unpacked to and built in a folder, with a C compiler."""
    shutil.unpack_archive(archive, folder)
    (sources,) = folder.iterdir()
    _setup(sources, "bdist_wheel", {"CC": compiler})
    (made,) = (sources / "dist").iterdir()
    return made


def script(path: Path, text: str) -> str:
    """Write a shell script that can be run, and return its path."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def _copy(names: Iterable[str], to: Path) -> None:
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)


def _setup(where: Path, command: str, variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", command],
        cwd=where,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
