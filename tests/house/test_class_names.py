"""One class name means one thing, in all packages together."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.house.support.sources import statements

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cache", "engine", "router", "monitoring", "deployments")


def test_no_public_class_name_is_defined_twice() -> None:
    assert names_defined_twice(ROOT, PACKAGES) == {}


def test_a_name_of_two_classes_is_found_and_a_private_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "p/q").mkdir(parents=True)
    (tmp_path / "p/a.py").write_text("class Once: ...\nclass Twice: ...\nclass _Private: ...")
    (tmp_path / "p/q/b.py").write_text("if True:\n    class Twice(list): ...\nclass _Private: ...")
    assert names_defined_twice(tmp_path, ["p"]) == {"Twice": ["p/a.py:2", "p/q/b.py:2"]}


def names_defined_twice(root: Path, packages: Iterable[str]) -> dict[str, list[str]]:
    """The public class names that are defined more than once below these folders, with file and line."""
    places = defaultdict(list)
    for path in sorted(path for package in packages for path in (root / package).rglob("*.py")):
        for node in statements(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(root).as_posix()}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}
