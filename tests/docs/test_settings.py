"""docs/tuning.md lists every setting once, with the default it has, in short rows; the usual ones come first."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.docs.support.known_names import REQUIRED, settings
from tests.docs.support.markdown_pages import ROOT, read_page

PAGE = ROOT / "docs/tuning.md"
FIRST = [
    *("engine.model", "engine.served_name", "engine.dtype", "engine.quantization"),
    *("engine.tensor_parallel_size", "engine.max_model_len", "engine.kv_memory_share", "engine.max_running"),
    *("engine.max_step_tokens", "engine.kv_dtype", "engines.count", "ingresses.count"),
    *("tenants[].name", "tenants[].key_hashes"),
]
"""What most operators look for."""
MOST_WORDS = 60
"""Longer explanations are paragraphs below their table."""


def documented(name: str = "docs/tuning.md") -> list[tuple[str, str]]:
    """Return setting and default of every row whose first cell holds settings."""
    rows = [cells for _, cells in read_page(ROOT / name).rows if len(cells) >= 2]
    return [(setting, cells[1][0] if cells[1] else "") for cells in rows for setting in cells[0]]


def spelled(default: Any) -> str:
    """Write a default as the page does: as YAML, large whole numbers in groups of three digits."""
    if default is REQUIRED:
        return "required"
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int):
        return f"{default:_}" if default >= 100_000 else str(default)
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, tuple):
        return str(list(default))
    return str(default) if default else f"{default!r}"


def test_every_setting_is_listed_once() -> None:
    names = [name for name, _ in documented()]
    assert sorted(set(names)) == sorted(settings())
    assert sorted(names) == sorted(set(names)), "listed twice"


def test_defaults_are_right() -> None:
    known = settings()
    assert [(name, given) for name, given in documented() if given != spelled(known[name])] == []


def test_the_settings_that_most_operators_look_for_come_first() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("## Settings to look at first\n")[2].partition("\n## ")[0]
    assert re.findall(r"`([^`]*)`", " ".join(row.split("|")[1] for row in rows_of(table))) == FIRST
    assert [name for name, _ in documented()][: len(FIRST)] == FIRST


def test_no_row_is_long() -> None:
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    assert len(rows) > 200
    assert [row for row in rows if len(row.replace("|", " ").split()) > MOST_WORDS] == []


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    ("default", "text"), [(None, "null"), (True, "true"), (4_000_000, "4_000_000"), (0.15, "0.15"), (30.0, "30")]
)
def test_defaults_are_spelled_as_yaml(default: Any, text: str) -> None:
    assert spelled(default) == text
