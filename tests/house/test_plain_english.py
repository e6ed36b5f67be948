"""Docstrings, comments, errors and pages are plain English: words that have to be read twice are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.support.plain_english import REPLACEMENTS, faults, texts_of_module, texts_of_page

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "cache",
    "engine",
    "router",
    "monitoring",
    "training",
    "k8s",
    "deployments",
)
PAGES = (
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    "examples/README.md",
    "k8s/README.md",
    "monitoring/RUNBOOK.md",
)
_ALLOWED = {
    *(f"| {word} | {other} |" for word, other in REPLACEMENTS.items()),
    "## One tenant's flood beside another tenant",
}
"""The list of words itself, and a heading to which CHANGELOG.md links."""


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_errors_and_comments_are_plain_english(package: str) -> None:
    root = ROOT / package
    assert root.exists()
    found = [
        f"{path.relative_to(ROOT)}:{line}: {fault!r} in {text[:80]!r}"
        for path in ([root] if root.is_file() else sorted(root.rglob("*.py")))
        for line, text in texts_of_module(path)
        for fault in faults(text)
    ]
    assert not found, "\n".join(["CONTRIBUTING.md says what to write instead:", *found])


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_plain_english(page: str) -> None:
    found = [
        f"{page}:{line}: {fault!r} in {text[:80]!r}"
        for line, text in texts_of_page((ROOT / page).read_text(encoding="utf-8"))
        if text not in _ALLOWED
        for fault in faults(text)
    ]
    assert not found, "\n".join(["CONTRIBUTING.md says what to write instead:", *found])


def test_contributing_lists_the_words() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [word for word, other in REPLACEMENTS.items() if f"| {word} | {other} |" not in page] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A request goes on at another engine.", ["goes on"]),
        ("Nobody alone sees it.", ["alone", "Nobody"]),
        ("What a request asks for.", ["What"]),
        ("What is a request? A prompt with parameters.", []),
        ("Work goes on to the next step.", []),
        ("Resume the stream immediately.", []),
    ],
)
def test_words_are_found(text: str, found: list[str]) -> None:
    assert list(faults(text)) == found


def test_docstrings_errors_and_comments_are_read(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""One."""\nx = "beside"  # Two.\n"""Three\nfour."""\nraise ValueError(f"five {x}")\n')
    assert list(texts_of_module(module)) == [(1, "One."), (3, "Three four."), (5, "five"), (2, "Two.")]


def test_the_prose_of_a_page_is_read_without_its_code_and_targets() -> None:
    page = """# Beside

See [it alone](alone.md#at-once), `beside`
and **more**.
```sh
echo anew
```
<!-- needs: somebody -->
- One
  point.

| `alone` | in turn |
"""
    assert list(texts_of_page(page)) == [
        (1, "# Beside"),
        (3, "See [it alone], and more."),
        (9, "- One point."),
        (12, "| | in turn |"),
    ]
