"""Settings in effect: a loaded config with the choices for the machine, and their form for `--dry-run`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from deployments.cli.errors import UserError, one_line
from deployments.cli.serve_config import IMPORT_PATH
from deployments.config.args import AppArgs
from deployments.config.chosen import Effective, FactsOf, choose
from deployments.config.live import leaves
from deployments.config.machine import Hardware
from deployments.config.shown import HIDDEN, shown_settings

Origin = Callable[[str], str]
"""Returns where a setting was given."""


def in_effect(
    config: Mapping[str, Any], machine: Hardware, facts_of: FactsOf
) -> tuple[dict[str, Any], tuple[Effective, ...]]:
    """Return a loaded config with its omitted settings that the machine decides. Raises UserError."""
    result = deepcopy(dict(config))
    ours = [application for application in result["applications"] if application.get("import_path") == IMPORT_PATH]
    try:
        effective = choose([application["args"] for application in ours], machine, facts_of)
    except ValueError as error:
        raise UserError(one_line(error)) from None
    for application, each in zip(ours, effective, strict=True):
        application["args"] = each.args
    return result, effective


def lines(given: Mapping[str, Any], effective: Effective, origin: Origin) -> Iterator[str]:
    """Yield a line for each setting of an application: given or chosen ones first, then the defaults."""
    rows = sorted(_rows(given, effective, origin), key=lambda row: row[2] == "default")
    width = max(len(path) for path, _, _ in rows)
    for path, value, reason in rows:
        yield f"{path:<{width}}  {value:<10}  # {reason}"


def _rows(given: Mapping[str, Any], effective: Effective, origin: Origin) -> Iterator[tuple[str, str, str]]:
    values = dict(_leaves(shown_settings(AppArgs.model_validate(effective.args))))
    chosen = {choice.path: choice for choice in effective.choices}
    values |= {choice.path: choice.value for choice in effective.choices}
    is_given = {path for path, value in _leaves(given) if value is not None and value != "auto"}
    for path, value in values.items():
        if path in chosen:
            reason = chosen[path].reason
        else:
            known = any(path == each or path.startswith(f"{each}.") for each in is_given)
            reason = origin(path) if known else "default"
        yield path, json.dumps(value), reason
    for path in HIDDEN:
        if given.get(path):
            yield path, "(not shown)", origin(path)


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each setting; models by their numbers."""
    models: Sequence[Any] = tree.get("models") or ()
    rest = {name: value for name, value in tree.items() if name not in ("models", *HIDDEN)}
    for prefix, part in [("", rest), *((f"models[{index}].", model) for index, model in enumerate(models))]:
        for path in leaves(part):
            yield f"{prefix}{path}", _at(part, path)


def _at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree[name]
    return tree
