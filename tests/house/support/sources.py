"""Reads statements of source files without looking at expressions, which are most of a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_INNER = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(path: Path) -> Iterator[ast.stmt]:
    """Each statement of a file, wherever it stands, an outer one before those in it. Raises SyntaxError."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        for name in _INNER:
            waiting += getattr(node, name, ())
