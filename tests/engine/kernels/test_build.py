"""The kernels' build when something is missing. The compilers are shell scripts, so nothing is compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from engine.kernels import build, native
from engine.kernels.build import build as build_kernels

ROOT = Path(__file__).parents[3]
FAKE = """#!/bin/sh
# {case}
case "$*" in
    *--version*) echo "{version}"; exit 0 ;;
    {case}) echo "fake.c:1: error: {complaint}" >&2; exit 1 ;;
esac
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


def compiler(
    at: Path, case: str = "nothing", complaint: str = "", version: str = "gcc, Free Software Foundation"
) -> str:
    """Return the path of a compiler that fails when its arguments match `case`, else creates its output."""
    path = at / "fakecc"
    path.write_text(FAKE.format(case=case, complaint=complaint, version=version), encoding="ascii")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(autouse=True)
def on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """The library's path, where an older library already is."""
    path = tmp_path / "lib" / "libraydix.so"
    path.parent.mkdir()
    path.write_text("old", encoding="ascii")
    path.with_suffix(".log").write_text("old", encoding="ascii")
    return path


def test_a_good_compiler_leaves_nothing_out(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", f"{compiler(tmp_path)} -pipe")
    assert build_kernels(library) == ""
    assert library.read_text(encoding="ascii") == "compiled\n"
    assert not library.with_suffix(".log").exists()


def test_an_instruction_set_that_is_not_known_is_left_out(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, "*-mamx-bf16*", "unrecognized option '-mamx-bf16'"))
    missing = build_kernels(library)
    assert missing == "amx (bfloat16) left out: fake.c:1: error: unrecognized option '-mamx-bf16'"
    assert library.exists() and library.with_suffix(".log").read_text(encoding="utf-8") == missing + "\n"


def test_threads_that_are_not_torchs_are_reported(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, version="some clang"))
    assert "prefer gcc" in build_kernels(library)
    assert library.exists()


@pytest.mark.parametrize(
    ("case", "complaint", "message"),
    [
        ("*-fopenmp*", "unsupported option '-fopenmp'", r"cpu\.c.*-fopenmp.*no OpenMP.*gcc"),
        ("*ISA=generic*", "no vectors here", r"all\.c: fake\.c:1: error: no vectors here$"),
        ("*-shared*", "no linker", "cannot link the kernels: .*no linker"),
    ],
)
def test_without_the_generic_kernels_there_is_no_library(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, complaint: str, message: str
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, case, complaint))
    missing = build_kernels(library)
    assert missing.startswith("not built: ") and re.search(message, missing), missing
    assert not library.exists(), "an old library would not fit the sources"
    assert library.with_suffix(".log").exists()


@pytest.mark.parametrize("cc", ["", "/nonexistent/cc"])
def test_without_a_compiler_there_is_no_library(library: Path, monkeypatch: pytest.MonkeyPatch, cc: str) -> None:
    monkeypatch.setenv("CC", cc)
    monkeypatch.setenv("PATH", str(library.parent))
    missing = build_kernels(library)
    assert missing.startswith("not built: ") and (cc or "install one") in missing
    assert not library.exists()


def test_another_processor_has_its_vectors_in_the_generic_set(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setenv("CC", compiler(tmp_path, "*-mavx*", "x86 flags on ARM"))
    assert build_kernels(library) == ""


def test_the_command_fails_only_without_a_library(tmp_path: Path) -> None:
    """The exit status is for Makefiles and people; the package's own build continues without a library."""
    script = ROOT / "engine" / "kernels" / "build.py"
    for case, status in (("*-mavx512f*", 0), ("*cpu.c*", 1)):
        environment = {"CC": compiler(tmp_path, case, "no"), "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-I", "-S", str(script), "-o", str(tmp_path / "x.so")]  # no package at hand
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert ran.returncode == status and "error: no" in ran.stderr


def test_the_loader_knows_the_libraries_that_are_built() -> None:
    assert tuple(build._ISAS) == native.ISAS and build.LIBRARY == native.LIBRARY


def test_the_sources_travel_with_the_package() -> None:
    """Source distributions and wheels contain them, so that the library can be built later, with a compiler."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["engine"]
    packed = {path for pattern in patterns for path in (ROOT / "engine").glob(pattern)}
    assert set(build.SOURCES.iterdir()) <= packed


def copy_of_setup(to: Path) -> None:
    """setup.py and the kernels, which are all that it needs."""
    for path in (ROOT / "engine" / "kernels").rglob("*.[pch]*"):
        if path.suffix in (".py", ".c", ".h"):
            copy = to / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (to / "engine" / "__init__.py").touch()
    (to / "setup.py").write_bytes((ROOT / "setup.py").read_bytes())


@pytest.mark.parametrize(("case", "tag"), [("nothing", "linux_x86_64"), ("*cpu.c*", "any")])
def test_a_wheel_is_for_one_platform_when_it_carries_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, tag: str
) -> None:
    """The wheel is for every Python version. The package here is only setup.py and the kernels."""
    pytest.importorskip(
        "setuptools.command.bdist_wheel", reason="this environment's setuptools is older than 70.1"
    )
    copy_of_setup(tmp_path)
    setup = (
        '[project]\nname = "raydix"\nversion = "1"\n[tool.setuptools]\npackages = ["engine", "engine.kernels"]\n'
    )
    (tmp_path / "pyproject.toml").write_text(setup, encoding="ascii")
    environment = {**os.environ, "CC": compiler(tmp_path, case, "no")}
    command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == f"raydix-1-py3-none-{tag}.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert ("engine/kernels/libraydix.so" in names) == (tag != "any")
    assert ("engine/kernels/libraydix.log" in names) == (tag == "any")


def test_an_editable_installation_warns_of_nothing(tmp_path: Path) -> None:
    """It is the first thing that `make` does, so a newcomer reads whatever it says. Packages are empty here."""
    copy_of_setup(tmp_path)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in tomllib.loads(project)["tool"]["setuptools"]["packages"]["find"]["include"]:
        package = tmp_path / name.rstrip("*")
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(project, encoding="utf-8")
    for name in ("README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "wheels").mkdir()
    build_editable = "from setuptools import build_meta; build_meta.build_editable('wheels')"
    environment = {**os.environ, "CC": compiler(tmp_path)}
    command = [sys.executable, "-c", build_editable]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and "!!" not in ran.stderr, ran.stderr  # which frames all of setuptools' warnings
    (wheel,) = (tmp_path / "wheels").iterdir()
    names = zipfile.ZipFile(wheel)
    (path,) = (names.read(name).decode() for name in names.namelist() if name.endswith(".pth"))
    assert path.strip() == str(tmp_path), "another copy would be imported"
