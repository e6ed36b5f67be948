"""docs/clients.md has every client's file, with all that it must see."""

from __future__ import annotations

import ast
import re

from tests.clients.support.clients import CLIENTS
from tests.docs.support.markdown_pages import ROOT

PAGE = (ROOT / "docs/clients.md").read_text(encoding="utf-8")


def test_each_file_of_tests_has_its_client() -> None:
    assert {path.name for path in (ROOT / "tests/clients").glob("test_*.py")} == CLIENTS.keys()


def test_the_page_has_the_checks_of_each_client() -> None:
    shown = re.findall(r"\| ([^|]+) \| (?:passed|failed|skipped) \|$", PAGE, re.MULTILINE)
    files = [ROOT / "tests/clients" / name for name in CLIENTS]
    assert sorted(shown) == sorted(
        node.name.removeprefix("test_").replace("_", " ")
        for path in files
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_the_page_reports_no_failure() -> None:
    assert not re.search(r"\| failed \|$", PAGE, re.MULTILINE)
