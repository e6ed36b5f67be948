"""The pages that quote figures are what `python -m benchmarks.report` writes from the result files."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import pytest

from benchmarks import report
from tests.docs.support.markdown_pages import read_page

_FIGURE = re.compile(r"\d[\d.,]*\s?(?:%|×|µs|ms|s|GB|tokens/s)(?![\w.])")  # noqa: RUF001
_FILLED_IN = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)


@pytest.mark.parametrize("path", [report.PAGE, report.README], ids=lambda path: path.name)
def test_the_committed_page_equals_the_output_of_the_command(path: Path) -> None:
    assert path.read_text("utf-8") == report.pages()[path], "run python -m benchmarks.report"


@pytest.mark.parametrize("path", sorted(report.TEMPLATES.iterdir()), ids=lambda path: path.name)
def test_no_figure_is_written_by_hand(path: Path) -> None:
    assert _FIGURE.findall(_FILLED_IN.sub("", path.read_text("utf-8"))) == []


def test_every_result_file_is_on_the_page() -> None:
    linked = {Path(target).name for _, target in read_page(report.PAGE).links}
    assert {path.name for path in report.RESULTS.glob("*.json")} - linked == set()


def test_a_figure_without_its_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    with pytest.raises(jinja2.UndefinedError):
        report.render("benchmarks.md.jinja")


def test_a_row_is_found_by_its_values_or_not_at_all() -> None:
    rows = [{"app": "wire", "streams": 1}, {"app": "wire", "streams": 8}]
    assert report.row(rows, streams=8) is rows[1]
    for wanted in ({"app": "wire"}, {"streams": 2}):
        with pytest.raises(ValueError, match="expected one"):
            report.row(rows, **wanted)


@pytest.mark.parametrize(
    ("value", "count", "text"),
    [(4119.462, 3, "4,120"), (90.722, 3, "90.7"), (0.8697, 2, "0.87"), (8.07, 3, "8.07"), (0, 2, "0")],
)
def test_numbers_have_so_many_significant_digits(value: float, count: int, text: str) -> None:
    assert report.digits(value, count) == text
