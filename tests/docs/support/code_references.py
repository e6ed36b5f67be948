"""Finds the parts of the code that pages name: files, folders, modules, and the definitions in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.support.markdown_pages import ROOT, files

PACKAGES = ("cache", "engine", "router", "monitoring", "deployments")
FOLDERS = (*PACKAGES, "benchmarks", "tests", "k8s", "docs", "examples", "training")
_SUFFIXES = "py|c|h|\\[ch\\]|md|yaml|yml|json|toml|svg|sh|jinja|png"
_PATH = re.compile(rf"(?:[\w.*-]+/)+(?:[\w.*-]+\.(?:{_SUFFIXES}))?")
_IN_FILE = re.compile(r"((?:[\w.-]+/)*[\w.-]+\.(?:py|c|h)): (\w+(?:\.\w+)*)(?:\(\))?")
_MODULE = re.compile(rf"(?:{'|'.join((*PACKAGES, 'benchmarks', 'tests'))})(?:\.\w+)+")
_MEMBER = re.compile(r"([A-Z]\w*)\.([a-z_]\w*)(?:\(\))?")
_CLASS_LINE = re.compile(r"^\s*class (\w+)", re.MULTILINE)
_CLASS = re.compile(r"[A-Z]+[a-z]+[A-Z]\w*")


def names_code(span: str) -> bool:
    """Whether a span is a path, `a/file.py: function`, `package.module.name`, `Class.method` or `Class`."""
    is_path = _PATH.fullmatch(span) is not None and span.split("/")[0] in FOLDERS
    is_module = _MODULE.fullmatch(span) is not None and not (ROOT / span).exists()
    is_member = (match := _MEMBER.fullmatch(span)) is not None and members(match[1]) is not None
    return is_path or is_module or is_member or any(p.fullmatch(span) for p in (_IN_FILE, _CLASS))


def code_problem(span: str, directory: Path = ROOT) -> str | None:
    """Return what is wrong with a span that refers to code; None when it leads there."""
    if match := _IN_FILE.fullmatch(span):
        return _not_defined(ROOT / match[1], match[2])
    if _PATH.fullmatch(span):
        return None if any(_exists(base, span) for base in (ROOT, directory)) else "no such file or folder"
    if _MODULE.fullmatch(span):
        return None if is_in_module(span) else "no such module, and nothing in it"
    if match := _MEMBER.fullmatch(span):
        return None if match[2] in inherited(match[1]) else f"{match[1]} has no {match[2]}"
    return None if span in _words() else "no such class"


def _exists(base: Path, path: str) -> bool:
    return any(base.glob(path)) if {"*", "["} & set(path) else (base / path).exists()


def _not_defined(path: Path, name: str) -> str | None:
    if not path.is_file():
        return "no such file"
    return None if name in _defined(path) else f"{path.name} does not define {name}"


@cache
def _defined(path: Path) -> set[str]:
    """Return the qualified names that a module defines, or the words of another file."""
    text = path.read_text(encoding="utf-8")
    return set(_names(ast.parse(text))) if path.suffix == ".py" else set(re.findall(r"\w+", text))


def is_in_module(name: str) -> bool:
    """Whether a dotted name is a module or package of ours, or something that a module defines."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:count])
        file = module.with_suffix(".py") if module.with_suffix(".py").is_file() else module / "__init__.py"
        if file.is_file() or module.is_dir():
            rest = ".".join(parts[count:])
            return not rest or (file.is_file() and rest in _defined(file))
    return False


def _names(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """Yield the qualified names of all that a module defines, imports included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name
            yield from _names(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(child, ast.ImportFrom):
            yield from (prefix + (alias.asname or alias.name) for alias in child.names)


@cache
def members(name: str) -> tuple[set[str], set[str]] | None:
    """Return the bases and the members of our classes of this name, taken together; None when there is none."""
    found: tuple[set[str], set[str]] | None = None
    for path in _files_by_class().get(name, ()):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name == name:
                bases, names = found = found or (set(), set())
                bases |= {base.id for base in node.bases if isinstance(base, ast.Name)}
                names |= set(_names(node))
                names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and _is_self(n.value)}
    return found


@cache
def _files_by_class() -> dict[str, list[Path]]:
    """Return the files in which a line begins like the definition of a class, by its name."""
    found: dict[str, list[Path]] = {}
    for path in files(".py"):
        for name in set(_CLASS_LINE.findall(path.read_text("utf-8"))):
            found.setdefault(name, []).append(path)
    return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def inherited(name: str) -> set[str]:
    """Return the members of a class, its own and those of its bases."""
    bases, names = members(name) or (set(), set())
    return names.union(*(inherited(base) for base in bases if base != name))


@cache
def _words() -> set[str]:
    """Return the words of all code and configuration except the tests of this module."""
    ours = [path for path in files(".py", ".yaml") if path.stat().st_size < 2**18 and path.name != "test_names.py"]
    return {word for path in ours for word in re.findall(r"\w+", path.read_text("utf-8"))}
