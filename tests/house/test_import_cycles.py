"""Neither a module nor a package imports itself by way of others, wherever the imports stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.support.import_graph import read_import_graph

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "cache",
    "engine",
    "router",
    "monitoring",
    "deployments",
    "k8s",
    "benchmarks",
    "examples",
    "training",
    "tests",
)


def test_no_imports_form_a_cycle() -> None:
    graph = read_import_graph(ROOT, FOLDERS)
    assert "engine.values.request" in graph.lines["engine.scheduling.scheduler"]
    assert list(graph.lines["tests.house.test_import_cycles"]) == ["tests.house.support.import_graph"]
    assert not (cycles := graph.cycles()), "\n".join(["these files import each other:", *cycles])


def test_no_packages_form_a_cycle() -> None:
    """Nor a package and a module beside it, at any depth: each folder has layers."""
    graph = read_import_graph(ROOT, ("cache", "engine", "router", "monitoring", "deployments"))
    found = graph.package_cycles()
    assert not found, "\n".join(["these import each other:", *found])


def cycles(root: Path, **sources: str) -> list[str]:
    """The cycles in a package `p` of these modules."""
    (root / "p").mkdir()
    for name, source in {"__init__": "", **sources}.items():
        (root / f"p/{name}.py").write_text(source)
    return read_import_graph(root, ["p"]).cycles()


def test_modules_that_import_each_other_are_found(tmp_path: Path) -> None:
    assert cycles(tmp_path, a="import p.b", b="import os\nfrom p import c", c="\n\nfrom p.a import name") == [
        "p/a.py:1 -> p/b.py:2 -> p/c.py:3 -> p/a.py"
    ]


@pytest.mark.parametrize(
    "back",
    [
        "if TYPE_CHECKING:\n    from p.a import A",
        "def f():\n    from p import a",
        "class B:\n    import p.a as other",
        "try:\n    from .a import *\nexcept ImportError: ...",
        "async def f():\n    from . import a",
    ],
)
def test_an_import_counts_wherever_it_stands(back: str, tmp_path: Path) -> None:
    assert cycles(tmp_path, a="from p.b import B", b=back) == ["p/a.py:1 -> p/b.py:2 -> p/a.py"]


def test_a_package_and_a_module_of_it_can_form_a_cycle(tmp_path: Path) -> None:
    assert cycles(tmp_path, __init__="from p.a import A", a="from p import name") == [
        "p/__init__.py:1 -> p/a.py:1 -> p/__init__.py"
    ]


def test_a_module_that_imports_itself_is_a_cycle(tmp_path: Path) -> None:
    assert cycles(tmp_path, a="import p.a") == ["p/a.py:1 -> p/a.py"]


def test_each_of_several_cycles_is_named(tmp_path: Path) -> None:
    found = cycles(tmp_path, a="import p.b", b="import p.a, p.c", c="import p.b", d="import p.e", e="import p.d")
    assert found == [
        "p/a.py:1 -> p/b.py:1 -> p/a.py",
        "p/b.py:1 -> p/c.py:1 -> p/b.py",
        "p/d.py:1 -> p/e.py:1 -> p/d.py",
    ]


def test_ways_that_meet_again_are_no_cycle(tmp_path: Path) -> None:
    """Nor is an import of the package that a module lies in, nor one of something that is not ours."""
    assert (
        cycles(tmp_path, a="import p.b, p.c", b="from p import d", c="from p.d import x", d="import ray, p") == []
    )


def test_packages_that_import_each_other_are_found(tmp_path: Path) -> None:
    """Even where no two files do, and wherever in the tree they lie."""
    sources = {
        "p/__init__.py": "from p.high.a import A",
        "p/high/a.py": "from p.low import c",
        "p/high/b.py": "import p.base",
        "p/low/c.py": "from p.low.deep import e",
        "p/low/d.py": "import p.high.b",
        "p/low/deep/e.py": "import p.base",
        "p/base.py": "",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    graph = read_import_graph(tmp_path, ["p"])
    assert graph.cycles() == []
    [cycle] = graph.package_cycles()
    assert cycle in ("p/: high -> low -> high", "p/: low -> high -> low")
