"""`raydix deploy`: put a config file into effect in a running Serve, and report whether it succeeded.

check config ─▶ choose omitted settings ─▶ live form ─▶ Serve builds the application and checks models
           ─▶ replicas apply the change or are replaced

A file with a mistake changes nothing. A change that running processes can apply restarts nothing.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from deployments.cli.effective import in_effect
from deployments.cli.errors import UserError
from deployments.cli.live_form import INGRESS
from deployments.cli.ray_environment import set_environment
from deployments.cli.serve import POLL_S, cause_of, quiet, read_live, start_ray, tell
from deployments.cli.serve_config import IMPORT_PATH, Overrides, load
from deployments.control.hardware import cluster
from deployments.control.model_files import known_facts
from router.ray_internals import deploy, rays_of_this_machine, serve_details

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

_ASK_S = 10.0
"""Seconds in which Serve's controller must report what runs."""


def run(path: Path, *, check: bool, verbose: bool) -> None:
    """Deploy a file and wait until it is in effect. Raises UserError when it fails; the old state then remains.

    With `check`, only look for mistakes: in the file, in the models' directories on this machine, and on the hub.
    """
    console = Console(stderr=True)
    config = load(path, Overrides())
    set_environment()
    read_live(config)
    if check:
        _check_models(config)
        console.print(
            f"{path} has no mistake that this machine can find.", markup=False, highlight=False, soft_wrap=True
        )
        return
    started = time.monotonic()
    with quiet(verbose):
        start_ray(_address(), verbose)
        config, effective = in_effect(config, cluster(), known_facts)
    tell(effective, console)
    schema = read_live(config)
    try:
        with quiet(verbose):
            _keep_request_lines(schema)
            deploy(schema)
        with console.status("Deploying") as status:
            _wait([application.name for application in schema.applications], status)
    except KeyboardInterrupt:
        raise UserError("stopped waiting, but the change continues: `serve status` shows its state", 130) from None
    console.print(
        f"{path} is in effect after {time.monotonic() - started:.0f} s.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _address() -> str:
    """Return the Ray to connect to. Raises UserError if this machine has several and none is named."""
    if given := os.environ.get("RAY_ADDRESS"):
        return given
    if len(found := sorted(rays_of_this_machine())) > 1:
        raise UserError(
            f"several Rays run on this machine, at {', '.join(found)}: set RAY_ADDRESS to the one to deploy to, "
            "and RAY_AUTH_MODE=token if it asks for a token, as the Ray of a `raydix serve` does",
            2,
        )
    return "auto"


def _check_models(config: dict[str, Any]) -> None:
    from deployments.config.args import AppArgs
    from deployments.control.model_files import check_model_files

    for application in config["applications"]:
        if application.get("import_path") == IMPORT_PATH:
            try:
                check_model_files(AppArgs.model_validate(application["args"]))
            except ValueError as error:
                raise UserError(f"{error} (--check looks on this machine only)") from None


def _keep_request_lines(schema: ServeDeploySchema) -> None:
    """Keep the pipe through which a running `raydix serve` shows requests, because no file mentions it."""
    running = serve_details(_ASK_S)
    for application in schema.applications:
        deployed = (running.get(application.name) or {}).get("deployed_app_config") or {}
        pipe = next((found for entry in deployed.get("deployments", ()) if (found := _access_log(entry))), None)
        for entry in application.deployments if pipe is not None and _is_pipe(pipe) else ():
            if entry.name == INGRESS:
                given = dict(entry.user_config) if isinstance(entry.user_config, dict) else {}
                entry.user_config = {**given, "logging": {"access_log": pipe, **given.get("logging", {})}}


def _access_log(entry: Any) -> str | None:
    """Return the file for request lines in an entry of `deployments`."""
    config = entry.get("user_config") if isinstance(entry, dict) and entry.get("name") == INGRESS else None
    found = (config.get("logging") or {}).get("access_log") if isinstance(config, dict) else None
    return found if isinstance(found, str) else None


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


def _wait(names: list[str], status: Any) -> None:
    """Return when all applications run as the file says. Raises UserError when one fails to."""
    from ray import serve

    while True:
        applications = serve.status().applications
        found = [applications.get(name) for name in names]
        for name, application in zip(names, found, strict=True):
            if application is not None and application.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise UserError(f"{name} runs unchanged: {cause_of(application)}")
        if all(application is not None and application.status.value == "RUNNING" for application in found):
            return
        told = [part.message for each in found if each is not None for part in each.deployments.values()]
        status.update("Deploying. " + " ".join(message for message in told if message))
        time.sleep(POLL_S)
