"""Writes docs/clients.md: which clients are tried, what each must see, and what it saw."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.support.clients import CLIENTS, left_out

_HEAD = """# Tested clients

`make clients` runs third-party clients against the application, from their own packages, in an environment
of their own. Each file of [tests/clients](../tests/clients) tries one client. Most talk to two models
that replay scripts of token ids, so that agents run their loops to the end: one model thinks, calls
functions and reports their results, and the other answers in the requested format, including JSON. lm-eval's
scores of the embedded model must be those of transformers.

This page is generated: `make clients CLIENTS_TABLE=docs/clients.md` writes it.

| Client | Version | Expected behaviour | Result |
| --- | --- | --- | --- |
"""


class Outcomes:
    """Collects the outcome of each test, and writes the page at the end."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._seen: dict[str, dict[str, str]] = {}
        self._why: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test: the worst of its phases."""
        file, _, test = report.nodeid.partition("::")
        test = test.split("[")[0]
        found = self._seen.setdefault(Path(file).name, {})
        if report.outcome != "passed" or test not in found:
            found[test] = report.outcome

    def pytest_sessionfinish(self) -> None:
        """Write the page."""
        rows = [row for file in CLIENTS for row in self._rows(file)]
        self._page.write_text(_HEAD + "\n".join(rows) + "\n", encoding="utf-8")

    def _rows(self, file: str) -> list[str]:
        client = CLIENTS[file]
        link = f"[{client.name}](../tests/clients/{file})"
        if file not in self._seen:
            return [f"| {link} | | | not tried: {left_out().get(file, 'not chosen')} |"]
        cells = [link, client.version()]
        rows = []
        for test, outcome in self._seen[file].items():
            said = test.removeprefix("test_").replace("_", " ")
            rows.append(f"| {cells[0]} | {cells[1]} | {said} | {outcome} |")
            cells = ["", ""]
        return rows
