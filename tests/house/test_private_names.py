"""What Ray does not promise is used in one file, which says what each of those names is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cache", "engine", "router", "monitoring", "deployments", "benchmarks", "examples", "training")
THE_FILE = "router/ray_internals.py"
ATTRIBUTES = {
    "_deployment_id",
    "routing_context",
    "should_backoff",
    "internal_request_id",
    "replica_metadata",
    "global_worker",
    "_replica_impl",
    "_shutting_down",
    "_set_request_context",
    "get_serve_instance_details",
    "update_deployment_replicas",
    "deploy_apps",
    "_apply_delay_logic",
}
"""Attributes and keys of Ray's and Serve's objects that are no public API; nothing of ours has such a name."""
_MAY_USE = re.compile(rf"\bray\b|node:__internal|{'|'.join(ATTRIBUTES)}")
"""What is in the text of every file with a private name: the syntax trees of others need not be looked at."""


def test_only_one_file_uses_private_names_of_ray() -> None:
    found = [use for use in private_uses(ROOT, FOLDERS) if not use.startswith(f"{THE_FILE}:")]
    assert not found, "\n".join([f"these belong into {THE_FILE}, with a contract test each:", *found])


def test_that_file_is_seen_to_use_them() -> None:
    assert any(use.startswith(f"{THE_FILE}:") for use in private_uses(ROOT, ["router"]))


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import ray._private.worker", "ray._private.worker"),
        ("def f():\n    from ray.serve._private import api", "ray.serve._private"),
        ("from ray.serve.context import _set_request_context as name", "ray.serve.context._set_request_context"),
        ("from ray import _raylet", "ray._raylet"),
        ("from ray.llm._internal.serve import x", "ray.llm._internal.serve"),
        ("pending.routing_context.should_backoff = True", "should_backoff"),
        ("getattr(controller, 'get_serve_instance_details')", "get_serve_instance_details"),
        ("sys.modules.get('ray._private.worker')", "ray._private.worker"),
        ("'node:__internal_head__' in resources", "node:__internal_head__"),
    ],
)
def test_a_private_name_is_found_wherever_it_stands(source: str, use: str, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p/a.py").write_text(source)
    assert any(found.endswith(f": {use}") for found in private_uses(tmp_path, ["p"]))


@pytest.mark.parametrize(
    "source", ["from ray.serve import get_replica_context", "import ray", "from rays._x import y", "a._x = b.args"]
)
def test_public_names_and_our_own_are_not_reported(source: str, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p/a.py").write_text(source)
    assert list(private_uses(tmp_path, ["p"])) == []


def private_uses(root: Path, folders: Iterable[str]) -> Iterator[str]:
    """Each use of a private name below these folders, as "file:line: name"."""
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if _MAY_USE.search(source) else ():
            for name in _private_names(node):
                line = getattr(node, "lineno", 0)
                yield f"{path.relative_to(root).as_posix()}:{line}: {name}"


def _private_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _is_private(alias.name))
    elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
        names = [node.module] if _is_private(node.module) else [f"{node.module}.{one.name}" for one in node.names]
        yield from (name for name in names if _is_private(name))
    elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
        if text in ATTRIBUTES or text.startswith("node:__internal") or (" " not in text and _is_private(text)):
            yield text


def _is_private(dotted: str) -> bool:
    """Whether a dotted name is one of Ray's with a part that begins with an underscore."""
    top, *parts = dotted.split(".")
    return top == "ray" and any(part.startswith("_") and not part.startswith("__") for part in parts)
