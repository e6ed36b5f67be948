"""The tour lists the core, whose lines are as many as the pages say, and few enough to be read in a day."""

from __future__ import annotations

import re

from tests.docs.support.markdown_pages import ROOT

MOST_LINES = 6_500
TOUR = (ROOT / "docs/tour.md").read_text()
[SECTION] = re.findall(r"^## The core\n(.*?)^## ", TOUR, re.M | re.S)
CORE = re.findall(r"^\| `([\w/]+\.py)` \| .+ \|$", SECTION, re.M)


def test_the_core_has_as_many_lines_as_the_pages_say() -> None:
    num_lines = sum(len((ROOT / name).read_text().splitlines()) for name in CORE)
    assert num_lines <= MOST_LINES
    assert f"{len(CORE)} files with {num_lines:,} lines" in SECTION
    assert f"{num_lines:,} lines in {len(CORE)} files" in (ROOT / "README.md").read_text()


def test_no_file_of_the_core_is_listed_twice() -> None:
    assert len(CORE) == len(set(CORE)) > 20


def test_the_scheduler_and_the_cache_are_in_it() -> None:
    """All that lies in these folders themselves, not in packages below them."""
    not_core = {"engine/scheduling/stats.py"}
    for folder in ("cache", "engine/scheduling"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("*.py")}
        assert files - not_core - {f"{folder}/__init__.py"} <= set(CORE)
