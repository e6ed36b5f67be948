"""`make quick` runs the tests that a change can reach, the nearest first, and names those that it leaves out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.house.support.quick import FILE_S, changed_files, choose, report
from tests.house.support.reach import Reach, reach_of
from tests.support.slow_tests import Durations

SOURCES = {
    "engine/__init__.py": "",
    "engine/values/__init__.py": "",
    "engine/values/request.py": "",
    "engine/scheduler.py": "def f():\n    from engine.values.request import Request",
    "engine/kernels/native/sample.c": "",
    "deployments/cli/models.yaml": "",
    "deployments/cli/plan.py": "",
    "deployments/cli/plans/data/gpus.json": "",
    "tests/conftest.py": "",
    "tests/cache/test_pages.py": "",
    "tests/engine/conftest.py": "from tests.engine.support.model import Model",
    "tests/engine/support/model.py": "import deployments.cli.plan",
    "tests/engine/test_scheduler.py": "from engine.scheduler import Scheduler",
    "tests/engine/values/test_request.py": "from engine.values import request",
    "tests/engine/kernels/test_sample.py": "",
    "tests/docs/test_links.py": "",
    "tests/house/test_folders.py": "",
}
EVERYWHERE = {"tests/docs/test_links.py": 0, "tests/house/test_folders.py": 0}
OF_ENGINE = (
    "tests/engine/test_scheduler.py",
    "tests/engine/values/test_request.py",
    "tests/engine/kernels/test_sample.py",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, source in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("engine/values/request.py", {OF_ENGINE[0]: 2, OF_ENGINE[1]: 1}),
        ("engine/scheduler.py", {OF_ENGINE[0]: 1}),
        ("engine/values/__init__.py", {OF_ENGINE[0]: 3, OF_ENGINE[1]: 2}),
        ("engine/values/gone.py", {OF_ENGINE[0]: 2, OF_ENGINE[1]: 1}),
        ("engine/kernels/native/sample.c", {OF_ENGINE[2]: 0}),
        ("tests/cache/test_pages.py", {"tests/cache/test_pages.py": 0}),
        ("tests/cache/test_gone.py", {}),
        ("tests/engine/conftest.py", dict.fromkeys(OF_ENGINE, 1)),
        ("tests/engine/support/model.py", dict.fromkeys(OF_ENGINE, 2)),
        ("deployments/cli/plan.py", dict.fromkeys(OF_ENGINE, 3)),
        ("deployments/cli/models.yaml", dict.fromkeys(OF_ENGINE, 3)),
        ("deployments/cli/plans/data/gpus.json", dict.fromkeys(OF_ENGINE, 3)),
        ("tests/conftest.py", dict.fromkeys([*OF_ENGINE, "tests/cache/test_pages.py"], 1)),
        ("docs/tuning.md", {}),
    ],
)
def test_a_change_reaches_the_tests_that_import_it_and_those_that_read_everything(
    changed: str, reached: dict[str, int], root: Path
) -> None:
    found = reach_of(root, [changed])
    assert (found.tests, found.not_understood) == (reached | EVERYWHERE, [])


@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "setup.py", ".ci/run", "tests/slow_tests.txt", "deployments/x"]
)
def test_a_file_of_which_nothing_is_known_is_named(changed: str, root: Path) -> None:
    found = reach_of(root, ["engine/scheduler.py", changed])
    assert found.not_understood == [changed]
    assert found.tests == {OF_ENGINE[0]: 1} | EVERYWHERE


def test_several_changes_reach_each_test_by_the_shortest_way(root: Path) -> None:
    found = reach_of(root, ["engine/values/request.py", "engine/scheduler.py", "engine/__init__.py"])
    assert found.tests == {OF_ENGINE[0]: 1, OF_ENGINE[1]: 1} | EVERYWHERE
    assert reach_of(root, []) == Reach()


def test_the_nearest_are_run_as_long_as_there_is_time() -> None:
    tests = {"tests/far.py": 3, "tests/near.py": 1, "tests/at.py": 0, "tests/e2e/test_a.py": 0, "tests/b.py": 2}
    durations = Durations(
        {"tests/near.py::test_slow": 9.0, "tests/at.py::test_b": 1.0, "tests/far.py::test_slow": 2.0},
        {"tests/near.py": 2.0, "tests/at.py": 3.0, "tests/b.py": 4.0, "tests/far.py": 0.1},
    )
    choice = choose(Reach(tests), durations, 5.0 + 2 * FILE_S)
    assert choice.run == ["tests/at.py", "tests/near.py"]
    assert choice.too_many == ["tests/b.py", "tests/far.py"], (
        "what is farther is not run in place of what is nearer"
    )
    assert choice.elsewhere == ["tests/e2e/test_a.py"]
    assert choice.slow == ["tests/at.py::test_b", "tests/near.py::test_slow"]
    assert choose(Reach(tests), durations, 0.0).run == ["tests/at.py"]
    said = report(Reach(tests, ["setup.py"]), choice, 1)
    assert said == [
        "tests: 2 files of 5 files that the change can reach",
        "what these reach is not known, only make test tells: setup.py",
        "left out as slow (tests/slow_tests.txt): tests/at.py::test_b and 1 more (--all names them)",
        "left out for lack of time: tests/b.py and 1 more (--all names them)",
        "left out, as make e2e runs them: tests/e2e/test_a.py",
    ]


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def test_a_change_is_all_that_differs_from_where_the_branch_began(root: Path) -> None:
    git(root, "init", "-b", "other")
    (root / ".gitignore").write_text("ignored.py\n")
    git(root, "add", ".")
    git(root, "commit", "-m", "a")
    with pytest.raises(RuntimeError, match="no branch origin/main or main to compare with"):
        changed_files(root)
    git(root, "branch", "main")
    (root / "engine/scheduler.py").write_text("a = 1\n")
    git(root, "mv", "tests/cache/test_pages.py", "tests/cache/test_other.py")
    git(root, "commit", "-a", "-m", "b")
    (root / "engine/values/request.py").write_text("b = 1\n")
    (root / "tests/docs/test_links.py").unlink()
    for new in ("new file.py", "ignored.py"):
        (root / new).write_text("")
    assert changed_files(root)[1] == [
        "engine/scheduler.py",
        "engine/values/request.py",
        "new file.py",
        "tests/cache/test_other.py",
        "tests/cache/test_pages.py",
        "tests/docs/test_links.py",
    ]
