"""The page by which people enter stays short."""

from __future__ import annotations

from pathlib import Path

MAX_LINES = 130


def test_the_readme_is_read_in_one_go() -> None:
    lines = (Path(__file__).resolve().parents[2] / "README.md").read_text().splitlines()
    assert len(lines) <= MAX_LINES, "details belong into docs/"
