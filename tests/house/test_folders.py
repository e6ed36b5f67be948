"""Where files lie: `deployments/` consists of rooms, and tests mirror the folders that they test."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from setuptools import find_namespace_packages

from tests.house.support.import_graph import read_import_graph

ROOT = Path(__file__).resolve().parents[2]
MAX_PACKAGES = 15


def test_deployments_consists_of_few_rooms() -> None:
    """`app.py` is what users name (`deployments.app:build`); everything else belongs into a room."""
    entries = {path for path in (ROOT / "deployments").iterdir() if path.name != "__pycache__"}
    assert len([path for path in entries if path.is_dir()]) <= MAX_PACKAGES
    assert sorted(path.name for path in entries if path.is_file()) == ["__init__.py", "app.py", "py.typed"]


def test_only_the_packages_are_installed() -> None:
    """Neither `tests` nor `examples` nor `benchmarks` may stand in the way of a user's own folder of that name."""
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    installed = {package.partition(".")[0] for package in find_namespace_packages(str(ROOT), **find)}
    assert installed == {"cache", "engine", "router", "monitoring", "deployments"}


def test_tests_lie_in_folders_named_like_the_packages_that_they_test() -> None:
    assert list(misplaced_tests(ROOT)) == []


def test_helpers_of_tests_lie_in_support_folders() -> None:
    assert list(misplaced_helpers(ROOT)) == []


def test_no_test_imports_another() -> None:
    """What two of them use is a helper."""
    graph = read_import_graph(ROOT, ["tests"])
    importers = {
        f"{graph.files[module].relative_to(ROOT)}:{line}: {imported}"
        for module, lines in graph.lines.items()
        for imported, line in lines.items()
        if imported.rpartition(".")[2].startswith("test_")
    }
    assert sorted(importers) == []


def test_a_test_in_the_wrong_folder_is_noticed(tmp_path: Path) -> None:
    places = """
        engine/loop.py engine/graphs/rows.py tests/conftest.py tests/house/test_house.py tests/engine/test_loop.py
        tests/engine/graphs/test_rows.py tests/engine/graphs/conftest.py tests/engine/scenarios/test_story.py
        tests/engine/support/script.py tests/engine/support/models/fake.py
        tests/engine/graph/test_rows.py tests/engine/graphs/more/test_rows.py tests/engine/support/test_script.py
        tests/engine/script.py tests/house/graph.py tests/helpers.py
    """
    for place in places.split():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    assert sorted(misplaced_tests(tmp_path)) == [
        "tests/engine/graph/test_rows.py",
        "tests/engine/graphs/more/test_rows.py",
        "tests/engine/support/test_script.py",
    ]
    assert sorted(misplaced_helpers(tmp_path)) == [
        "tests/engine/script.py",
        "tests/helpers.py",
        "tests/house/graph.py",
    ]


def misplaced_tests(root: Path) -> Iterator[str]:
    """Tests in `tests/<folder>/<path>/` where there is a `<folder>/` but no `<folder>/<path>/` in it.

    Scenarios test a folder as a whole, so they may lie beside the tests of its parts, in a folder of that name.
    """
    for path in sorted(root.glob("tests/*/**/test_*.py")):
        tested, *parts = path.parent.relative_to(root / "tests").parts
        if parts[-1:] == ["scenarios"]:
            parts.pop()
        if (root / tested).is_dir() and not (root / tested).joinpath(*parts).is_dir():
            yield path.relative_to(root).as_posix()


def misplaced_helpers(root: Path) -> Iterator[str]:
    """Modules below `tests/` that are neither tests, nor `conftest.py`, nor in a `support/` folder."""
    for path in sorted(root.glob("tests/**/*.py")):
        is_special = path.name.startswith("test_") or path.name == "conftest.py"
        if not is_special and "support" not in path.relative_to(root).parts:
            yield path.relative_to(root).as_posix()
