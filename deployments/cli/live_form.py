"""Moves settings that running processes can apply out of `args`, so that changing them restarts nothing.

    args: {limits: …, engines: {count: 2}, …}   ──▶   deployments: [{name: Ingress, user_config: {limits: …}},
                                                                    {name: EngineReplica, num_replicas: 2}]

Users write one plain file. Their own entries under `deployments` stay, and override `args`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from deployments.cli.serve_config import IMPORT_PATH
from deployments.config.args import AppArgs
from deployments.config.live import LIVE_IN_HUB, check_live, is_live, merged, with_live
from router.fetch.roles import ROLES

INGRESS, HUB = "Ingress", "MetricsHub"


def live_form(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, checked by `load`, in this form. Raises ValueError for a wrong `user_config`."""
    result = deepcopy(dict(config))
    for application in result["applications"]:
        if application.get("import_path") == IMPORT_PATH:
            _move(application)
    return result


def _move(application: dict[str, Any]) -> None:
    args = application["args"]
    checked = AppArgs.model_validate(args)
    rest, live = _split(_without_counts(args, checked))
    counts = {INGRESS: checked.ingresses.count} | {
        name: pool.least
        for served, model in checked.served.items()
        if model.load_at_start  # The others are scaled manually.
        for name, pool in model.deployments(served).items()
        if pool.scaling is None
    }
    level = {path: value for path, value in live.get("logging", {}).items() if f"logging.{path}" in LIVE_IN_HUB}
    moved: dict[str, dict[str, Any]] = {name: {"num_replicas": count} for name, count in counts.items()}
    for name, settings in ((INGRESS, live), (HUB, {"logging": level} if level else {})):
        if settings:
            moved.setdefault(name, {})["user_config"] = settings
    application["args"] = rest
    application["deployments"] = _with_entries(moved, application.get("deployments") or [])
    _check(AppArgs.model_validate(rest), application["deployments"])


def _split(args: Mapping[str, Any], where: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that stay in `args`, and those that running processes apply."""
    rest: dict[str, Any] = {}
    live: dict[str, Any] = {}
    for key, value in args.items():
        path = f"{where}{key}"
        if isinstance(value, Mapping):
            stays, goes = _split(value, f"{path}.")
            rest |= {key: stays} if stays else {}
            live |= {key: goes} if goes else {}
        else:
            (live if is_live(path) else rest)[key] = value
    return rest, live


def _without_counts(args: Mapping[str, Any], checked: AppArgs) -> dict[str, Any]:
    """Return `args` without the numbers of replicas, or with 1 for each role."""
    result = deepcopy(dict(args))
    (result.get("ingresses") or {}).pop("count", None)
    for model, part in zip(checked.served.values(), result.get("models") or [result], strict=True):
        engines = part.get("engines") or {}
        if model.load_at_start:
            engines.pop("count", None)
            for role in (roles := engines.get("roles") or {}):
                if role in ROLES and isinstance(roles[role], int):
                    roles[role] = 1
    return result


def _with_entries(moved: Mapping[str, Mapping[str, Any]], written: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of `deployments`: the written ones, and moved settings that they do not set."""
    by_name = {str(entry.get("name")): entry for entry in written}
    names = [*by_name, *(name for name in moved if name not in by_name)]
    return [{"name": name, **merged(moved.get(name, {}), by_name.get(name, {}))} for name in names]


def _check(args: AppArgs, deployments: list[dict[str, Any]]) -> None:
    """Raise ValueError for a `user_config` that processes would refuse, and for an unknown deployment."""
    known = (INGRESS, HUB, *args.pools)
    for entry in deployments:
        name, given = entry["name"], entry.get("user_config") or {}
        if name not in known:
            raise ValueError(f"deployments: there is no deployment {name!r}; there are {', '.join(known)}")
        try:
            if name == INGRESS:
                with_live(args, given)
            else:
                check_live(given, LIVE_IN_HUB if name == HUB else ())
        except ValueError as error:
            raise ValueError(f"deployments: {name}: {error}") from None
