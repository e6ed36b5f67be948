"""Which tests a change can reach: those that import what was changed, directly or by way of others.

    engine/values/request.py ◀─ engine/scheduling/scheduler.py ◀─ tests/engine/scheduling/test_preemption.py
                           distance 1                        distance 2

What a test only starts or reads by its name is not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.house.support.import_graph import ImportGraph, read_import_graph
from tests.support.slow_tests import READ_EVERYTHING

FOLDERS = ("cache", "engine", "router", "monitoring", "deployments", "k8s", "benchmarks", "examples", "tests")
"""Folders with modules."""
KERNELS, KERNEL_TESTS = "engine/kernels/native/", "tests/engine/kernels/"
"""The kernels in C, and what tests them."""


@dataclass(slots=True)
class Reach:
    """What changed files reach."""

    tests: dict[str, int] = field(default_factory=dict)
    """Paths of test files, with the number of imports between each and what was changed."""
    not_understood: list[str] = field(default_factory=list)
    """Changed files of which nothing is known: what they reach is not among the tests."""


def reach_of(root: Path, changed: Iterable[str]) -> Reach:
    """Return the tests that changes of files can reach, by their paths in `root`, of which some may be gone.

    A conftest is imported by all tests below it. Data counts as a part of the modules that lie in its folder, or
    in the next one above it. Tests that read all files are reached by every change.
    """
    graph = read_import_graph(root, [name for name in FOLDERS if (root / name).is_dir()])
    places = {path.relative_to(root).as_posix(): module for module, path in graph.files.items()}
    tests = {module: name for name, module in places.items() if _is_test(name)}
    found, starts = Reach(), dict[str, int]()
    for name in sorted(changed):
        begun = _starts(name, places)
        if begun is None:
            found.not_understood.append(name)
        else:
            starts |= begun
        starts |= {module: 0 for module, test in tests.items() if test.startswith(READ_EVERYTHING)}
    distances = _distances(starts, _importers(graph, places))
    found.tests = {tests[module]: distance for module, distance in distances.items() if module in tests}
    return found


def _is_test(name: str) -> bool:
    return name.startswith("tests/") and PurePosixPath(name).name.startswith("test_")


def _starts(name: str, places: dict[str, str]) -> dict[str, int] | None:
    """Return the modules that the change of a file changes, with their distance; None if that is not known."""
    path = PurePosixPath(name)
    if name.startswith(KERNELS):
        return {places[test]: 0 for test in places if test.startswith(KERNEL_TESTS) and _is_test(test)}
    if path.suffix == ".md":  # read by tests that read everything
        return {}
    if path.name == "__init__.py":  # runs before each module below it
        below = {module: 1 for place, module in places.items() if place.startswith(f"{path.parent}/")}
        return below | ({places[name]: 0} if name in places else {})
    if name in places:
        return {places[name]: 0}
    if _is_test(name):  # it is gone
        return {}
    for folder in path.parents[:-1]:
        beside = {module: 0 for place, module in places.items() if PurePosixPath(place).parent == folder}
        if beside and str(folder) != "tests":
            return beside
    return None


def _importers(graph: ImportGraph, places: dict[str, str]) -> dict[str, set[str]]:
    """By module, those that import it."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module, imported in graph.lines.items():
        for other in imported:
            importers[other].add(module)
    for name, module in places.items():
        if name.endswith("/conftest.py"):
            below = name.removesuffix("conftest.py")
            importers[module].update(places[test] for test in places if test.startswith(below) and _is_test(test))
    return importers


def _distances(starts: dict[str, int], importers: dict[str, set[str]]) -> dict[str, int]:
    """Return what can be reached from modules, with the least number of imports on the way."""
    known: dict[str, int] = {}
    waiting = [module for module, distance in starts.items() if not distance]
    later = [module for module, distance in starts.items() if distance]
    distance = 0
    while waiting or later:
        for module in waiting:
            known.setdefault(module, distance)
        nearest = {other for module in waiting for other in importers.get(module, ())}
        waiting = [module for module in (*nearest, *later) if module not in known]
        later, distance = [], distance + 1
    return known
