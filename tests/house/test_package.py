"""What is installed: the packages with their files, and nothing else of the repository."""

from __future__ import annotations

import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support.packages import script, source_distribution, tracked, wheel_of

PACKAGES = ("cache", "engine", "router", "monitoring", "deployments")
NOT_INSTALLED = (
    "monitoring/RUNBOOK.md", "monitoring/alerts/*.test.yaml", "monitoring/dashboards/kustomization.yaml",
    "monitoring/prometheus.yml",
)  # fmt: skip
"""Files in the packages' folders for those who operate or test a checkout."""
COMPILER = """
case "$*" in *--version*) echo "gcc, Free Software Foundation"; exit ;; esac
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip(
        "setuptools.command.bdist_wheel", reason="this environment's setuptools is older than 70.1"
    )
    return source_distribution(tmp_path_factory.mktemp("sdist"))


def installed() -> set[str]:
    return {name for name in tracked(*PACKAGES) if not any(fnmatch(name, pattern) for pattern in NOT_INSTALLED)}


def test_the_source_distribution_has_the_files_that_a_build_needs(archive: Path) -> None:
    with tarfile.open(archive) as files:
        names = {member.name.partition("/")[2] for member in files.getmembers() if member.isfile()}
    of_setuptools = {name for name in names if name.startswith("raydix.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - of_setuptools == installed() | {"pyproject.toml", "setup.py", "README.md", "LICENSE"}


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_wheel_has_only_the_packages(archive: Path, tmp_path: Path, has_compiler: bool) -> None:
    """Without a compiler it is for any platform, and its log says what it lacks."""
    compiler = script(tmp_path / "cc", COMPILER) if has_compiler else str(tmp_path / "none")
    wheel = wheel_of(archive, tmp_path / "sources", compiler)
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if ".dist-info/" not in name}
        entry_points = files.read(next(name for name in files.namelist() if name.endswith("entry_points.txt")))
    made = "engine/kernels/libraydix.so" if has_compiler else "engine/kernels/libraydix.log"
    assert names == installed() | {made}
    assert wheel.stem.endswith("-py3-none-any") != has_compiler
    assert b"raydix = deployments.cli:main" in entry_points
