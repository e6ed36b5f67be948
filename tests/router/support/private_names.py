"""The table of docs/frameworks.md: names of Ray that are no public API."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[3] / "docs/frameworks.md"


class PrivateName(NamedTuple):
    """A row of the table."""

    name: str
    use: str
    why: str
    breaks: str


def private_names() -> dict[str, PrivateName]:
    """The rows by their names."""
    table = PAGE.read_text(encoding="utf-8").partition("## Names of Ray")[2]
    rows = [PrivateName(*line.strip("| ").split(" | ")) for line in table.splitlines() if line.startswith("| `")]
    return {row.name.strip("`"): row for row in rows}
