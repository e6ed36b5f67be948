"""Relative links lead to files that exist, and to headings in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.support.markdown_pages import ROOT, files, read_page


@pytest.mark.parametrize("path", files(".md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    broken = [
        f"{path.name}:{line}: {target}" for line, target in read_page(path).links if not _leads(path, target)
    ]
    assert broken == []


def _leads(page: Path, target: str) -> bool:
    if target.startswith(("https://", "http://")):
        return True
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.is_relative_to(ROOT) or not path.exists():
        return False
    return not anchor or (path.suffix == ".md" and anchor in read_page(path).anchors)


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs/index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for _, target in read_page(index).links}
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page not in {*linked, index}] == []


@pytest.mark.parametrize(
    "target",
    ["tuning.md", "tuning.md#an-engine", "#raydix", "../README.md#figures", "architecture.svg", "https://x.y"],
)
def test_a_link_that_leads_somewhere_passes(target: str) -> None:
    assert _leads(ROOT / "docs/index.md", target)


@pytest.mark.parametrize(
    "target",
    ["tunning.md", "tuning.md#an-engin", "#raydixx", "README.md", "/docs/tuning.md", "../../../etc/passwd"],
)
def test_a_broken_link_is_noticed(target: str) -> None:
    assert not _leads(ROOT / "docs/index.md", target)
