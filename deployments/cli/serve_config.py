"""Loads the config of `raydix serve`: a config file or the embedded model, with the command line's overrides."""

from __future__ import annotations

import errno
import os
import socket
import sys
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.cli.errors import UserError, one_line

DEFAULT_FILE = "deployments.yaml"
IMPORT_PATH = "deployments.app:build"
_ADDRESS = {"host": "127.0.0.1", "port": 8000}
"""Where clients connect unless a config or the command line says otherwise."""
EMBEDDED_MODEL: dict[str, Any] = {
    "proxy_location": "Disabled",
    "applications": [
        {
            "name": "raydix",
            "import_path": IMPORT_PATH,
            "args": {
                "engine": {"model": "demo", "kv_pages": 2048, "threads": 1},
                "engines": {"count": 2, "num_cpus": 0.25},
                "ingresses": {"count": 1, "num_cpus": 0.25, **_ADDRESS},
            },
        }
    ],
}
"""Config that is served without a file, equal to the deployments.yaml that comes with the source."""

_MODEL_OPTIONS = "--model, --replicas, --pipeline-parallel, --context-parallel and --tensor-parallel"


_EXPECTED = (
    f"Expected YAML with `applications:` and a list, one of them with `import_path: {IMPORT_PATH}`, as in the "
    "deployments.yaml that comes with the source"
)


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values of the command line that replace the file's; None keeps the file's value."""

    host: str | None = None
    port: int | None = None
    model: str | None = None
    replicas: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    context_parallel: int | None = None

    @property
    def of_a_model(self) -> bool:
        """Whether any of them needs a config with one model."""
        sizes = self.replicas, self.tensor_parallel, self.pipeline_parallel, self.context_parallel
        return any(each is not None for each in (self.model, *sizes))

    @property
    def paths(self) -> dict[str, str]:
        """Map the setting in `args` that each given option replaces to the option."""
        names = {"engine.model": "model", "engines.count": "replicas", "ingresses.host": "host"}
        names |= {"ingresses.port": "port", "engine.tensor_parallel_size": "tensor_parallel"}
        names |= {"engine.pipeline_parallel_size": "pipeline_parallel"}
        names |= {"engine.context_parallel_size": "context_parallel"}
        return {
            path: f"--{name.replace('_', '-')}" for path, name in names.items() if getattr(self, name) is not None
        }


def load(path: Path | None, overrides: Overrides) -> dict[str, Any]:
    """Return the config with its overrides, ready for Serve's schema. Raises UserError."""
    path = file_for(path)
    config = deepcopy(EMBEDDED_MODEL) if path is None else _read(path)
    ours = [app for app in config["applications"] if app.get("import_path") == IMPORT_PATH]
    if not ours and overrides.of_a_model:
        raise UserError(f"{_MODEL_OPTIONS} need an application with import_path {IMPORT_PATH} in {path}", 2)
    for application in ours:
        _override(application, overrides)
        _check(application, path)
    given = {key: value for key in ("host", "port") if (value := getattr(overrides, key)) is not None}
    direct = [application for application in ours if _is_direct(application)]
    for application in direct:
        args = application["args"]
        args["ingresses"] = {**(args.get("ingresses") or {}), **given}
    if len(direct) < len(config["applications"]) or not direct:
        config["http_options"] = {**_ADDRESS, **(config.get("http_options") or {}), **({} if direct else given)}
    elif "proxy_location" not in config:
        _check_no_address(config, path)
        config["proxy_location"] = "Disabled"  # a proxy would occupy the port
    return config


def file_for(path: Path | None) -> Path | None:
    """Return the file to read: the named one, or else a deployments.yaml in this directory."""
    return Path(DEFAULT_FILE) if path is None and Path(DEFAULT_FILE).is_file() else path


def address(config: dict[str, Any]) -> tuple[str, int]:
    """Return the host and the port at which clients reach a loaded config: an ingress's own, or the proxy's."""
    direct = [
        application["args"]["ingresses"] for application in config["applications"] if _is_direct(application)
    ]
    place = {**_ADDRESS, **(direct[0] if direct else config["http_options"])}
    return place["host"], int(place["port"])


def _check_no_address(config: dict[str, Any], path: Path | None) -> None:
    """Raise UserError for the address of a proxy that no client connects to."""
    for key in _ADDRESS.keys() & (config.get("http_options") or {}).keys():
        raise UserError(
            f"{path}: http_options.{key} is for Serve's proxy, but clients connect to the ingresses: give it "
            f"as args.ingresses.{key} instead, or set args.ingresses.http to serve",
            2,
        )


def _is_direct(application: dict[str, Any]) -> bool:
    ingresses = (application.get("args") or {}).get("ingresses") or {}
    return application.get("import_path") == IMPORT_PATH and ingresses.get("http", "direct") == "direct"


def models(config: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return the models that the config's applications load, each with its revision on the hub, if given."""
    return [
        ((engine := part.get("engine") or {}).get("model", "demo"), engine.get("model_revision"))
        for app in config["applications"]
        if app.get("import_path") == IMPORT_PATH
        for part in app["args"].get("models") or [app["args"]]
    ]


def check_port(host: str, port: int, *, may_be_in_use: bool = False) -> None:
    """Raise UserError if no server can listen there, before Ray starts instead of ten seconds later."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        if may_be_in_use and error.errno == errno.EADDRINUSE:
            return
        reason = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else one_line(error)
        raise UserError(
            f"cannot listen on {host}:{port} ({reason}): choose another with --port or --host"
        ) from None


def check_metrics_ports(config: dict[str, Any]) -> None:
    """Raise UserError when a metrics hub's own port cannot be used."""
    from deployments.config.args import AppArgs
    from deployments.hub.server import MetricsPortError, listen

    for app in config["applications"]:
        if app.get("import_path") == IMPORT_PATH:
            metrics = AppArgs.model_validate(app["args"]).metrics
            try:
                if metrics.port is not None:
                    listen(metrics.host, metrics.port).close()
            except MetricsPortError as error:
                raise UserError(str(error)) from None


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {(error.strerror or 'unknown reason').lower()}", 2) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {one_line(error)}", 2) from None
    applications = config.get("applications") if isinstance(config, dict) else None
    if (
        not applications
        or not isinstance(applications, list)
        or not all(isinstance(app, dict) for app in applications)
    ):
        fault = "it is empty" if config is None else "it has no list of applications"
        raise UserError(f"{path} is not a Ray Serve config: {fault}. {_EXPECTED}", 2)
    return dict(config)


def _override(application: dict[str, Any], overrides: Overrides) -> None:
    args = application["args"] = copy(application.get("args") or {})
    sections = ("engine", "engines", "ingresses")
    if not isinstance(args, dict) or not all(isinstance(args.get(name) or {}, dict) for name in sections):
        return  # the next check refuses it
    if args.get("models") and overrides.of_a_model:
        raise UserError(f"{_MODEL_OPTIONS} need a config with one model, but it has several: edit the config", 2)
    if overrides.model is not None:
        _without(args, "engine", "model_revision", "served_name", "kv_pages", "threads")  # those of its model
        if (args["engine"].get("model") or "demo") == "demo":  # sizes that suit only the embedded model
            _without(args, "engines", "count", "num_cpus")
            _without(args, "ingresses", "count", "num_cpus")
        args["engine"]["model"] = overrides.model
    sizes = {
        "tensor_parallel_size": overrides.tensor_parallel,
        "pipeline_parallel_size": overrides.pipeline_parallel,
        "context_parallel_size": overrides.context_parallel,
    }
    if given := {name: size for name, size in sizes.items() if size is not None}:
        args["engine"] = {**(args.get("engine") or {}), **given}
    if overrides.replicas is not None:
        _without(args, "engines", "autoscaling")  # --replicas asks for a fixed number
        args["engines"]["count"] = overrides.replicas


def _without(args: dict[str, Any], section: str, *names: str) -> None:
    """Remove settings from a copy of a section."""
    args[section] = {name: value for name, value in (args.get(section) or {}).items() if name not in names}


def _check(application: dict[str, Any], path: Path | None) -> None:
    """Raise UserError for wrong arguments here, in one line, instead of in a worker's log.

    Removed settings are left out, with a warning.
    """
    from pydantic import ValidationError

    from deployments.config.args import AppArgs
    from deployments.config.faults import first_fault
    from deployments.config.removed import without_removed

    source = path or "the options"
    if isinstance(args := application["args"], dict):
        application["args"] = without_removed(
            args, lambda message: print(f"warning: {source}: {message}", file=sys.stderr)
        )
    try:
        AppArgs.model_validate(application["args"])
    except ValidationError as error:
        raise UserError(f"{source}: {first_fault(error, 'args')}", 2) from None
