"""Reads what can be checked of a Markdown page: its blocks, links, anchors and code spans."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[3]
DOCS = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"
COMMAND_PAGES = (README, *DOCS, ROOT / "monitoring/RUNBOOK.md", ROOT / "k8s/README.md")
"""Pages whose blocks are executed, validated or marked."""
NAME_PAGES = (*COMMAND_PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md")
"""Pages in which every name of the code must exist."""

_PARSER = MarkdownIt("commonmark").enable("table")
_MARKER = re.compile(r"<!--\s*(needs|tested by):\s*(.*?)\s*-->", re.DOTALL)
_FOREIGN = re.compile(r"\.\w|build/|node_modules/")
"""Files and folders in a checkout that are not part of the repository."""


def files(*suffixes: str) -> list[Path]:
    """The repository's files with these suffixes."""
    return [path for path in _files() if path.suffix in suffixes]


@cache
def _files() -> list[Path]:
    return sorted(_walk())


def _walk() -> Iterator[Path]:
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if not _FOREIGN.match(f"{name}/")]
        yield from (Path(folder, name) for name in names if not _FOREIGN.match(name))


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    text: str
    marker: tuple[str, str] | None
    """("needs", "cluster") or ("tested by", "tests/x.py::test_y"), from the comment right before it."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(slots=True)
class Page:
    """One page, parsed."""

    path: Path
    blocks: list[Block] = field(default_factory=list)
    links: list[tuple[int, str]] = field(default_factory=list)
    """(line, target) of links and images."""
    anchors: set[str] = field(default_factory=set)
    spans: list[tuple[int, str]] = field(default_factory=list)
    """(line, text) of `code`."""
    rows: list[tuple[int, list[list[str]]]] = field(default_factory=list)
    """(line, the code spans of each cell) of table rows."""


@cache
def read_page(path: Path) -> Page:
    """Parse a page, which nobody changes."""
    page = Page(path)
    tokens = _PARSER.parse(path.read_text(encoding="utf-8"))
    line = 0
    for index, token in enumerate(tokens):
        line = token.map[0] + 1 if token.map else line
        if token.type == "fence":
            language = token.info.split()[0] if token.info.split() else ""
            page.blocks.append(Block(path, line, language, token.content, _marker(tokens[index - 1])))
        elif token.type == "tr_open":
            page.rows.append((line, []))
        elif token.type == "inline":
            _read_inline(page, token, line)
            kind = tokens[index - 1].type
            if kind in ("td_open", "th_open"):
                page.rows[-1][1].append([child.content for child in _code(token)])
            elif kind == "heading_open":
                page.anchors.add(_anchor(token, page.anchors))
    return page


def _read_inline(page: Page, token: Token, line: int) -> None:
    for child in token.children or ():
        target = child.attrGet("href") if child.type == "link_open" else child.attrGet("src")
        if child.type in ("link_open", "image"):
            page.links.append((line, str(target)))
    page.spans += [(line, child.content) for child in _code(token)]


def _code(token: Token) -> list[Token]:
    return [child for child in token.children or () if child.type == "code_inline"]


def _marker(before: Token) -> tuple[str, str] | None:
    match = _MARKER.fullmatch(before.content.strip()) if before.type == "html_block" else None
    return (match[1], match[2]) if match else None


def _anchor(heading: Token, taken: set[str]) -> str:
    """The anchor GitHub makes of a heading."""
    text = "".join(child.content for child in heading.children or ()).strip().lower()
    name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
    numbered = (name if number == 0 else f"{name}-{number}" for number in range(len(taken) + 1))
    return next(anchor for anchor in numbered if anchor not in taken)
