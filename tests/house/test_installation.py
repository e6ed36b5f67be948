"""`make install` leaves nothing to be compiled when a server starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib.util import cache_from_source
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cache", "deployments", "engine", "monitoring", "router")
INSTALLS_TORCH = """
from pathlib import Path
torch = Path(__file__).parents[1] / "torch"
torch.mkdir()
(torch / "__init__.py").write_text("import torch.deep")
(torch / "deep.py").write_text("")
(torch / "newer.py").write_text("class of a later Python:")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile, a module for each package, and an environment whose pip installs a little torch."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for path in ("pyproject.toml", "constraints.txt", "setup.py", "engine/kernels/build.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    for package in PACKAGES:
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "module.py").write_text("x = 1")
    venv.create(tmp_path / ".venv", symlinks=True)
    pip = site_packages(tmp_path) / "pip"
    pip.mkdir()
    (pip / "__main__.py").write_text(INSTALLS_TORCH)
    return tmp_path


def site_packages(checkout: Path) -> Path:
    [found] = checkout.glob(".venv/lib/python*/site-packages")
    return found


def install(checkout: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPYCACHEPREFIX", "MAKEFLAGS")}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    make = ["make", "install", f"PYTHON={sys.executable}"]
    return subprocess.run(make, cwd=checkout, env=env, capture_output=True, text=True, timeout=120)


def is_compiled(path: Path) -> bool:
    return Path(cache_from_source(str(path))).exists()


@pytest.mark.skipif(sys.pycache_prefix is not None, reason="bytecode is not beside its sources here")
def test_packages_and_our_own_modules_are_compiled_whatever_the_environment_says(checkout: Path) -> None:
    done = install(checkout)
    assert done.returncode == 0, done.stderr
    torch = site_packages(checkout) / "torch"
    assert is_compiled(torch / "__init__.py") and is_compiled(torch / "deep.py")
    assert all(is_compiled(checkout / package / "module.py") for package in PACKAGES)
    assert "Compiling" in done.stdout
    # What another Python would compile is no reason not to install.
    assert not is_compiled(torch / "newer.py") and "Error" not in done.stdout + done.stderr


def test_the_packages_that_are_compiled_are_those_of_the_project() -> None:
    [line] = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("PACKAGES")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert (
        set(line.partition(":=")[2].split())
        == {pattern.removesuffix("*") for pattern in included}
        == set(PACKAGES)
    )


def test_a_mistake_in_our_own_sources_fails_the_installation(checkout: Path) -> None:
    (checkout / "router" / "module.py").write_text("class of no Python:")
    done = install(checkout)
    assert done.returncode != 0 and "router/module.py" in done.stdout
