"""Words that make a sentence hard to read, with their replacements, and the texts in which they are looked for."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPLACEMENTS = {
    "beside": "with, next to, besides",
    "alone": "only, by itself",
    "go on": "resume, continue",
    "nobody, somebody, whoever": "a named subject: a client, another thread",
    "at once": "immediately, or: together",
    "anew": "again, from the beginning",
    "as far as": "up to, if",
    "in its place": "instead",
    "one after the other": "in turn",
}
"""What CONTRIBUTING.md lists."""
PATTERNS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\bbeside\b",
        r"\balone\b",
        r"\b(go|goes|going|went) on\b(?! to\b)",
        r"\b(nobody|somebody|whoever)\b",
        r"\bat once\b",
        r"\banew\b",
        r"\bas far as\b",
        r"\bin (its|their) place\b",
        r"\bone after the other\b",
    )
]
_NOT_A_SUBJECT = re.compile(r"(?:What|Who)\b")
"""How the first sentence of a docstring must not begin, unless it is a question."""


def texts_of_module(path: Path) -> Iterator[tuple[int, str]]:
    """Yield a Python file's docstrings, texts of errors, and comments, each in one line, with the number of its
    first line.
    """
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, " ".join(node.value.value.split())
        elif isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, " ".join(part.value.split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


_NO_PROSE = re.compile(r"^(```|~~~).*?^\1$|<!--.*?-->|(`+)(?!`).+?(?<!`)\2(?!`)|(?<=\])\([^)\s]*\)", re.M | re.S)
"""Code, comments and the targets of links."""


def texts_of_page(page: str) -> Iterator[tuple[int, str]]:
    """Yield the prose of a Markdown page: each paragraph and table row in one line, with its line number."""
    lines = _NO_PROSE.sub(lambda found: "\n" * found[0].count("\n"), page).splitlines()
    paragraph: list[str] = []
    for number, line in enumerate([*lines, ""], start=1):
        starts = not line.strip() or re.match(r"\s*([|#>*-]|\d+\.) ", line)
        if starts and paragraph:
            yield number - len(paragraph), " ".join(" ".join(paragraph).replace("**", "").split())
            paragraph = []
        if line.strip():
            paragraph.append(line)


def faults(text: str) -> Iterator[str]:
    """Yield the words of a text that are to be replaced."""
    for pattern in PATTERNS:
        yield from (found[0] for found in pattern.finditer(text))
    first_sentence = re.split(r"(?<=[.?!]) ", text)[0]
    if (found := _NOT_A_SUBJECT.match(text)) and not first_sentence.endswith("?"):
        yield found[0]
