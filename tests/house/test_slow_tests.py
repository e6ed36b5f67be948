"""The table of slow tests is of tests that there are, and says when and how it was measured."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.house.support.sources import statements
from tests.support.slow_tests import (
    READ_EVERYTHING,
    SLOW_READER_S,
    TABLE,
    Durations,
    measured,
    read_table,
    written,
)

ROOT = Path(__file__).resolve().parents[2]
LOG = """\
============================= slowest durations ==============================
12.34s call     tests/a/test_x.py::test_of_many[one-1]
0.26s setup    tests/a/test_x.py::test_of_many[two-test_y.py::z]
0.20s call     tests/a/test_x.py::test_brief
0.10s teardown tests/a/test_x.py::test_brief
0.29s call     tests/a/test_x.py::TestKind::test_inner
2.50s call     tests/house/test_y.py::test_reads_all_files
1 failed, 3 passed in 15.00s
"""


def test_each_entry_is_of_a_test_that_there_is() -> None:
    """Where a test was renamed or moved, change its entry; where many were, measure again."""
    durations = read_table()
    assert durations.slow and durations.rest
    missing = [name for name in durations.rest if not (ROOT / name).is_file()]
    defined: dict[str, set[str]] = {}
    for entry in durations.slow:
        name, *parts = entry.split("::")
        if name not in defined:
            defined[name] = {"runTest", *names_in(ROOT / name)}  # of hypothesis' state machines
        if not defined[name].issuperset(parts):
            missing.append(entry)
    assert not missing, "\n".join([f"{TABLE.name} has what is no test:", *missing])


def names_in(path: Path) -> Iterator[str]:
    """Functions, classes, and what is assigned."""
    for node in statements(path) if path.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_the_table_states_when_and_how_it_was_measured() -> None:
    said = re.search(r"# Measured on (\d{4}-\d\d-\d\d): \S.*\.\n", TABLE.read_text(encoding="utf-8"))
    assert said is not None and datetime.fromisoformat(said[1]) <= datetime.now()


def test_slow_tests_are_marked(request: pytest.FixtureRequest) -> None:
    """The marker is for the functions of the table, with all parameters, and for no others."""
    slow = read_table().slow
    for item in request.session.items:
        is_slow = item.get_closest_marker("slow") is not None
        assert is_slow == (item.nodeid.partition("[")[0] in slow), item.nodeid


def test_a_function_is_as_slow_as_all_that_it_does() -> None:
    """With all parameters, in all phases; what reads all files may take longer."""
    found = measured(LOG.splitlines())
    assert found.slow == {
        "tests/a/test_x.py::test_of_many": pytest.approx(12.6),
        "tests/a/test_x.py::test_brief": pytest.approx(0.3),
    }
    assert SLOW_READER_S > 2.5 and READ_EVERYTHING[0] == "tests/house/"
    assert found.rest == {"tests/a/test_x.py": 0.29, "tests/house/test_y.py": 2.5}


def test_a_written_table_is_read_again(tmp_path: Path) -> None:
    table = tmp_path / "table.txt"
    durations = Durations({"tests/a.py::test_b": 0.4, "tests/a.py::test_a": 3.0}, {"tests/a.py": 0.2})
    table.write_text(written(durations, "alone", datetime(2026, 11, 29, tzinfo=UTC)))
    assert read_table(table) == durations
    assert "# Measured on 2026-11-29: alone.\n" in table.read_text()
    assert [line.split()[0] for line in table.read_text().splitlines()[3:]] == ["3.0", "0.4", "0.2"]


@pytest.mark.parametrize("line", ["tests/a.py::test_b 0.4", "0.4", "", "x tests/a.py"])
def test_an_invalid_line_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text(f"# of tests\n{line}\n")
    with pytest.raises(ValueError, match=re.escape(f"table.txt:2 is {line!r}, and 'SECONDS PATH' was expected")):
        read_table(tmp_path / "table.txt")


def test_a_log_without_durations_is_refused() -> None:
    with pytest.raises(ValueError, match="run pytest with --durations=0"):
        measured(["1 passed in 2.00s"])
