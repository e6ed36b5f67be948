"""The import graph of a source tree, read from the sources, and the cycles in it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from tests.house.support.sources import statements


@dataclass(slots=True)
class ImportGraph:
    """Which module imports which, wherever in a file the import stands: in a function, under TYPE_CHECKING, ..."""

    root: Path
    files: dict[str, Path] = field(default_factory=dict)
    """The file of each module, by the module's dotted name."""
    lines: dict[str, dict[str, int]] = field(default_factory=dict)
    """The modules that each module imports, with the line of the first such import."""

    def cycles(self) -> list[str]:
        """Cycles without a common import, so that each import that has to go is in one of them.

        A cycle is a chain `a.py:3 -> b.py:7 -> a.py`: line 3 of a.py imports b, line 7 of b.py imports a.
        """
        left = {module: set(imported) for module, imported in self.lines.items()}
        found = []
        while cycle := _any_cycle(left):
            found.append(self._chain(cycle))
            for importer, imported in pairwise(cycle):
                left[importer].remove(imported)
        return sorted(found)

    def package_cycles(self) -> list[str]:
        """The same between the entries of each folder, its packages and modules: `a/: b.py -> c/ -> b.py`."""
        found = []
        for folder, entries in sorted(self._entries().items()):
            while cycle := _any_cycle(entries):
                found.append(f"{folder}/: {' -> '.join(cycle)}")
                for importer, imported in pairwise(cycle):
                    entries[importer].remove(imported)
        return found

    def _entries(self) -> dict[str, dict[str, set[str]]]:
        """By folder, which of its entries imports which others."""
        folders: dict[str, dict[str, set[str]]] = {}
        for module, lines in self.lines.items():
            own = self._name(module).split("/")
            for other in map(self._name, lines):
                parts = other.split("/")
                depth = next(
                    (at for at, pair in enumerate(zip(own, parts, strict=False)) if pair[0] != pair[1]), 0
                )
                if depth:
                    entries = folders.setdefault("/".join(own[:depth]), {})
                    entries.setdefault(own[depth], set()).add(parts[depth])
        return folders

    def _chain(self, cycle: list[str]) -> str:
        smallest = cycle.index(min(cycle))
        turned = [*cycle[smallest:], *cycle[1 : smallest + 1]]
        steps = [f"{self._name(a)}:{self.lines[a][b]}" for a, b in pairwise(turned)]
        return " -> ".join([*steps, self._name(turned[-1])])

    def _name(self, module: str) -> str:
        return self.files[module].relative_to(self.root).as_posix()


def read_import_graph(root: Path, folders: Iterable[str]) -> ImportGraph:
    """The graph of all modules below these folders of `root`; imports of anything else are left out."""
    graph = ImportGraph(root)
    for folder in folders:
        graph.files |= {_module_name(path.relative_to(root)): path for path in (root / folder).rglob("*.py")}
    for module, path in graph.files.items():
        lines = graph.lines[module] = {}
        for name, line in _imports_of(path, module):
            if imported := _longest_known(name, graph.files):
                lines[imported] = min(line, lines.get(imported, line))
    return graph


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache  # several graphs have the same files in them
def _imports_of(path: Path, module: str) -> tuple[tuple[str, int], ...]:
    return tuple(_imports(path, module))


def _imports(path: Path, module: str) -> Iterator[tuple[str, int]]:
    """The dotted names that a file imports, with their lines; `from a import b` is `a.b`, a module or not."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = [*base, *(node.module.split(".") if node.module else [])]
            yield from ((".".join([*start, alias.name]), node.lineno) for alias in node.names)


def _longest_known(name: str, modules: Iterable[str]) -> str | None:
    """The module that a dotted name leads to: itself, or the module that defines its last parts."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in modules), None)


def _any_cycle(imports: dict[str, set[str]]) -> list[str] | None:
    """Modules of which each imports the next; the first is also the last."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle[::-1]  # the sorter names what is imported before what imports it
    return None
