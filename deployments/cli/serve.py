"""`raydix serve`: `serve run CONFIG` on its own Ray, reporting when it is ready or why it failed.

check config, port and model ─▶ choose omitted settings ─▶ Ray ─▶ Serve ─▶ deploy ─▶ healthy
           ─▶ watch, until a signal ─▶ shut down
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from deployments.cli.controller_watch import WATCH_S, ControllerWatch, Gone
from deployments.cli.effective import in_effect, lines
from deployments.cli.errors import UserError, one_line
from deployments.cli.left_behind import Guard, adopt_orphans, descendants, end_descendants
from deployments.cli.pending import Pending, waited_for
from deployments.cli.ray_environment import set_environment
from deployments.cli.request_lines import shown_requests
from deployments.cli.serve_config import (
    IMPORT_PATH,
    Overrides,
    address,
    check_metrics_ports,
    check_port,
    file_for,
    load,
    models,
)
from deployments.config.chosen import Effective
from deployments.control.hardware import cluster as cluster_machine
from deployments.control.hardware import this_machine
from deployments.control.model_files import facts, known_facts
from engine.settings.config import EngineConfig
from router.ray_internals import deploy, ended_ray_processes, few_ray_processes, serve_namespace

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

POLL_S = 0.1
STATUS_S = 1.0
"""Seconds between two requests for the state of all replicas: each takes Serve's controller, and this process,
tens of milliseconds, which slow a start on few cores.
"""
END_S = 15.0
"""Seconds in which Ray's processes can end by themselves."""
_READY = ("healthy", "unloaded")
"""States of /health in which all models that are loaded at the start are up."""

_REFUSED = re.compile(r"^Deploying app '.*?' failed with exception: ")
"""Serve's prefix of the message of an application that it could not build."""


class _Stopped(Exception):
    """Raised after a signal that asks to end."""


class Signals:
    """Handles SIGINT and SIGTERM: the first asks to end, the next one to end immediately."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._hurry = False
        self.install()

    def install(self) -> None:
        """Install the handlers. Call it again after Ray has installed its own handler for SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def check(self, wait: float = 0.0) -> None:
        """Wait up to `wait` seconds. Raises `_Stopped` when a signal came."""
        if self._asked.wait(wait):
            raise _Stopped

    def allow_hurry(self) -> None:
        """Let signals raise KeyboardInterrupt immediately from now on."""
        self._hurry = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Nothing is raised while Ray starts, because a half-started Ray is harder to shut down.
        if self._hurry:
            raise KeyboardInterrupt
        self._asked.set()


def run(
    path: Path | None,
    *,
    host: str | None,
    port: int | None,
    model: str | None,
    replicas: int | None,
    tensor_parallel: int | None,
    pipeline_parallel: int | None,
    context_parallel: int | None,
    dry_run: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Serve until a signal comes. Raises UserError when that fails, with no process left running.

    With `dry_run`, print the settings in effect instead, or raise the same errors.
    """
    console = Console(stderr=True)
    overrides = Overrides(host, port, model, replicas, tensor_parallel, pipeline_parallel, context_parallel)
    config = load(path, overrides)
    cluster = os.environ.get("RAY_ADDRESS")
    set_environment()
    if dry_run:
        _show(config, cluster, overrides, file_for(path), console, verbose)
        return
    is_shown = not quiet and cluster is None  # Ingresses of a cluster may be on other machines.
    with shown_requests(config, console) if is_shown else nullcontext():
        _serve(config, cluster, console, verbose)


def _serve(config: dict[str, Any], cluster: str | None, console: Console, verbose: bool) -> None:
    read_live(config)
    own_host, own_port = address(config)
    num_gpus = None
    if cluster is None:
        check_port(own_host, own_port)
        check_metrics_ports(config)
        _check_models(models(config), _downloaded)
        machine = this_machine()
        config, effective = in_effect(config, machine, facts)
        tell(effective, console)
        num_gpus = len(machine.nodes[0].gpus) or None
    signals = Signals()
    started = time.monotonic()
    url = f"http://{_reachable(own_host)}:{own_port}"
    adopt_orphans()
    guard, has_deployed = Guard(), False
    try:
        with Pending(console) as pending:
            pending.on("Ray: starting" if cluster is None else "Ray: connecting")
            with quiet(verbose):
                start_ray(cluster, verbose, num_gpus)
            signals.install()
            guard.follow(descendants())
            if cluster is not None:
                config, effective = in_effect(config, cluster_machine(), known_facts)
                tell(effective, console)
            schema = read_live(config)
            signals.check()
            pending.on("Serve: starting")
            has_deployed = True
            with quiet(verbose):
                deploy(schema)
                health = _wait_until_ready(schema, url, signals, pending)
        _announce(console, url, list(health.get("models") or ()), time.monotonic() - started)
        _watch(signals, guard)
    except _Stopped:
        console.print("[dim]Waiting for open streams to end. Press Ctrl-C again to stop immediately.[/]")
    finally:
        with quiet(verbose):
            if has_deployed and not isinstance(sys.exc_info()[1], Gone):
                _end_serve(signals)
            _end_ray()
            guard.dismiss()
            end_descendants(END_S)


@contextmanager
def quiet(verbose: bool) -> Iterator[None]:
    """Keep the raylet's messages off the terminal: we report causes ourselves, and its last messages are noise."""
    with ExitStack() as stack:
        if not verbose:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield


def _show(
    config: dict[str, Any],
    cluster: str | None,
    overrides: Overrides,
    path: Path | None,
    console: Console,
    verbose: bool,
) -> None:
    """Print the settings in effect, one on a line, each with its reason. Starts nothing. Raises UserError."""
    read_live(config)
    if cluster is None:
        check_port(*address(config), may_be_in_use=True)  # perhaps by the server that is being asked about
        _check_models(models(config), facts)
        result, effective = in_effect(config, this_machine(), facts)
        _check_builds(result)
    else:
        with quiet(verbose):
            start_ray(cluster, verbose)
            try:
                result, effective = in_effect(config, cluster_machine(), known_facts)
                _check_builds(result)
            finally:
                _end_ray()
    read_live(result)
    options = overrides.paths
    file = "part of the demo, which is served without a file" if path is None else f"given in {path}"
    shown = [app for app in config["applications"] if app.get("import_path") == IMPORT_PATH]
    for application, each in zip(shown, effective, strict=True):
        if len(config["applications"]) > 1:
            print(f"# {application['name']}")
        for line in lines(
            application["args"], each, lambda path: f"given by {options[path]}" if path in options else file
        ):
            print(line)
    for application in config["applications"]:
        if application not in shown:
            print(f"# {application['name']} ({application.get('import_path')}): its arguments are not Raydix's")
    tell(effective, console)


def tell(effective: Sequence[Effective], console: Console) -> None:
    """Print what the operator should know before the start."""
    for warning in dict.fromkeys(warning for each in effective for warning in each.warnings):
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for each in effective:
        for choice in each.choices:
            if choice.path == "responses.store" and choice.value != "memory":
                console.print(
                    f"Stored responses are kept in {choice.value}: several ingresses share them.",
                    style="dim",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )


def _check_models(named: list[tuple[str, str | None]], read: Callable[[EngineConfig], object]) -> None:
    """Read the models' files. Raises UserError."""
    for name, revision in named:
        try:
            read(EngineConfig(model=name, model_revision=revision))
        except ValueError as error:  # ModelLoadError is one
            raise UserError(one_line(error)) from None


def _downloaded(config: EngineConfig) -> object:
    """Download a model here, with a progress bar; replicas then load it from the cache. Raises ValueError."""
    from engine.model_config.any_model import model_facts
    from engine.model_files.model_directory import resolve_model

    return model_facts(resolve_model(config.model, config.model_revision))


def _check_builds(config: Mapping[str, Any]) -> None:
    """Raise UserError if Serve would fail to build the applications, as `_wait_until_ready` does."""
    from deployments.app import build
    from deployments.config.args import AppArgs

    for application in config["applications"]:
        if application.get("import_path") == IMPORT_PATH:
            try:
                build(AppArgs.model_validate(application["args"]))
            except (ValueError, RuntimeError) as error:
                raise UserError(f"{application['name']} did not start: {one_line(error)}") from None


def start_ray(cluster: str | None, verbose: bool, num_gpus: int | None = None) -> None:
    """Connect to a cluster, or start this process's own Ray, with so many GPUs, after `set_environment`.

    With `num_gpus` None, Ray counts them, without instances of MIG. Raises UserError.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"ray\.")
    import ray

    level = logging.INFO if verbose else logging.ERROR
    logging.getLogger("ray.serve").setLevel(level)
    quiet: dict[str, Any] = {"logging_level": level, "log_to_driver": verbose, "namespace": serve_namespace()}
    try:
        if cluster is not None:
            ray.init(address=cluster, **quiet)
        else:
            with few_ray_processes(shows_logs=verbose):
                ray.init(address="local", include_dashboard=False, num_gpus=num_gpus, **quiet)
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # Otherwise a call after Ray's end would start another Ray.
    except Exception as error:
        if cluster is not None:
            raise UserError(
                f"cannot connect to a running Ray ({cluster}): {one_line(error).rstrip('.')}. Start one, for "
                "example with `raydix serve`, or set RAY_ADDRESS to its address, and RAY_AUTH_MODE=token if it "
                "asks for a token"
            ) from None
        raise UserError(f"Ray does not start: {one_line(error)}") from None


def read_live(config: dict[str, Any]) -> ServeDeploySchema:
    """Parse a config, checked by `load`, in its live form. Raises UserError."""
    from deployments.cli.live_form import live_form
    from deployments.config.serve_schema import read_serve_config

    try:
        return read_serve_config(live_form(config))
    except ValueError as error:
        raise UserError(f"the config is not valid: {one_line(error)}", 2) from None


def _wait_until_ready(schema: ServeDeploySchema, url: str, signals: Signals, pending: Pending) -> dict[str, Any]:
    """Return the result of /health when all applications run and it agrees. Loading models has no time limit."""
    from ray import serve

    names = [application.name for application in schema.applications]
    own = [application.name for application in schema.applications if application.import_path == IMPORT_PATH]
    asked_at = -math.inf
    with httpx.Client(timeout=5.0) as client:
        while True:
            signals.check(wait=POLL_S)
            _check_ray()
            found = _health(client, url)
            if found is None and time.monotonic() - asked_at < STATUS_S:
                continue
            asked_at = time.monotonic()
            applications = serve.status().applications
            for name in names:
                if name in applications and applications[name].status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
                    raise UserError(f"{name} did not start: {cause_of(applications[name])}")
            pending.on(waited_for(applications, names, own))
            running = all(name in applications and applications[name].status.value == "RUNNING" for name in names)
            if running and found is not None:
                return found


def _watch(signals: Signals, guard: Guard) -> None:
    """Watch Ray and Serve until a signal comes. Raises Gone when one of them has ended."""
    from ray import serve

    with closing(ControllerWatch(lambda: bool(serve.status().applications))) as controller:
        while True:
            signals.check(wait=WATCH_S)
            _check_ray()
            controller.check()
            guard.follow(descendants())


def _check_ray() -> None:
    """Raise Gone when a process has ended that Ray needs to start and replace others."""
    if gone := _ended_of_ray():
        raise Gone(f"Ray's {' and '.join(gone)} ended, and all processes here with it; start the server again")


def _ended_of_ray() -> list[str]:
    return [kind for kind in ended_ray_processes() if kind in ("raylet", "gcs_server")]


def _health(client: httpx.Client, url: str) -> dict[str, Any] | None:
    """Return the report of /health if it is healthy. Applications without that page count as healthy."""
    from deployments.api.http.scopes import OWN_PROBE

    try:
        response = client.get(f"{url}/health", headers={"user-agent": OWN_PROBE})
        if response.status_code == 404:
            return {}
        found: dict[str, Any] = response.json()
        return found if response.status_code == 200 and found.get("status", "healthy") in _READY else None
    except (httpx.HTTPError, ValueError, AttributeError):
        return None


def cause_of(application: Any) -> str:
    """Extract the exception that ended a replica from Serve's messages with their tracebacks."""
    messages = [application.message, *(part.message for part in application.deployments.values())]
    for message in reversed(messages):
        lines = [line.strip() for line in str(message or "").splitlines()]
        errors = [line for line in lines if ": " in line and line.split(": ")[0].endswith(("Error", "Exception"))]
        if errors:
            return errors[-1]
    told = " ".join(str(application.message).split())
    return _REFUSED.sub("", told) or "no reason given; --verbose shows the workers' logs"


def _announce(console: Console, url: str, models: list[str], seconds: float) -> None:
    """Print the server's address and commands to try."""
    if not models:
        console.print(f"Ready at {url} after {seconds:.0f} s. Ctrl-C stops it.")
        return
    model, names = models[0], ", ".join(models) + (" is" if len(models) == 1 else " are")
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What does itertools.chain do?"}}]}}'
    curl = f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    lines = [
        f"[bold]{escape(names)}[/] ready at [bold]{url}/v1[/] after {seconds:.0f} s. Ctrl-C stops it.",
        f"Talk to it:  [cyan]{escape(_own_name())} chat --url {url}[/]",
    ]
    console.print(Panel("\n".join(lines), expand=False))
    # Printed outside the frame, so that it can be copied.
    console.print(curl, style="cyan", markup=False, highlight=False, soft_wrap=True)


def _own_name() -> str:
    """Return the name of this command, or its path if the shell would not find it."""
    return "raydix" if shutil.which("raydix") else os.path.relpath(sys.argv[0])


def _end_serve(signals: Signals) -> None:
    """End the applications when their streams have ended, then Serve."""
    import ray
    from ray import serve

    signals.allow_hurry()
    try:
        if ray.is_initialized():
            # Applications are deleted first: replicas drain behind a running proxy, so open streams can finish.
            for name in list(serve.status().applications):
                serve.delete(name)
            serve.shutdown()
    except KeyboardInterrupt:
        pass
    except Exception as error:  # the controller may be gone already; ray.shutdown() ends the rest
        logging.getLogger(__name__).debug("serve.shutdown: %s", error)


def _end_ray() -> None:
    import ray

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ray.shutdown()


def _reachable(host: str) -> str:
    """Return an address at which a server that listens on `host` can be reached."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
