"""`raydix rollout`: show the versions of models and the rollouts of new ones, and control these."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from deployments.cli.api_key import given_key
from deployments.cli.errors import UserError
from deployments.cli.loose_json import number, objects, text
from deployments.cli.printable import printable
from deployments.cli.unreachable import unreachable

app = typer.Typer(help="Versions of models: show and control the rollout of a new one.", no_args_is_help=True)

KEY_ENV = "RAYDIX_ADMIN_KEY"
_PATH = "/v1/cluster/rollouts"
_TIMEOUT_S = 10.0

Model = Annotated[str, typer.Argument(help="Name of the model.", show_default=False)]
Url = Annotated[str, typer.Option(help="URL of a Raydix server.")]
KeyEnv = Annotated[
    str | None,
    typer.Option(help="Environment variable that has the admin key.", show_default=f"{KEY_ENV}, if set"),
]
Key = Annotated[
    str | None, typer.Option(help="The admin key itself, which other users may see.", show_default=False)
]
_LOCAL = "http://127.0.0.1:8000"


@app.command("list")
def show(
    url: Url = _LOCAL,
    key_env: KeyEnv = None,
    key: Key = None,
    json: Annotated[bool, typer.Option("--json", help="Print the server's JSON document.")] = False,
) -> None:
    """Show each model that has versions: their shares of its sessions, and the rollout of a new version."""
    document = _ask("GET", url, "", key, key_env)
    if json:
        typer.echo(json_module.dumps(document))
        return
    models = list(objects(document.get("data")))
    if not models:
        typer.echo("No model has versions.")
    for model in models:
        _print(model)


@app.command()
def pause(model: Model, url: Url = _LOCAL, key_env: KeyEnv = None, key: Key = None) -> None:
    """Let a rollout take no further step; it is still rolled back if the version exceeds a limit."""
    _print(_ask("POST", url, f"/{quote(model)}/pause", key, key_env))


@app.command()
def resume(model: Model, url: Url = _LOCAL, key_env: KeyEnv = None, key: Key = None) -> None:
    """Resume a paused rollout, or begin one again that was rolled back or aborted."""
    _print(_ask("POST", url, f"/{quote(model)}/resume", key, key_env))


@app.command()
def abort(model: Model, url: Url = _LOCAL, key_env: KeyEnv = None, key: Key = None) -> None:
    """Take all sessions from the new version, also after its rollout is done."""
    _print(_ask("POST", url, f"/{quote(model)}/abort", key, key_env))


def _ask(method: str, url: str, path: str, key: str | None, key_env: str | None) -> dict[str, Any]:
    """Return the server's answer. Raises UserError."""
    import httpx

    given = given_key(key, key_env, KEY_ENV)
    headers = {} if given is None else {"authorization": f"Bearer {given}"}
    server = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.request(method, f"{server}{_PATH}{path}", headers=headers, timeout=_TIMEOUT_S)
    except (httpx.InvalidURL, ValueError):
        raise UserError(f"{url!r} is not a URL", 2) from None
    except httpx.HTTPError as error:
        raise UserError(unreachable(server, error)) from None
    try:
        document = answer.json()
    except ValueError:
        document = None
    if isinstance(document, dict) and answer.is_success:
        return document
    error_object = document.get("error") if isinstance(document, dict) else None
    said = text(error_object.get("message")) if isinstance(error_object, dict) else None
    raise UserError(f"{server}: {printable(said) if said else f'HTTP {answer.status_code}'}")


def _print(model: Mapping[str, Any]) -> None:
    try:
        shown = list(lines(model))
    except (AttributeError, TypeError, ValueError):
        raise UserError("the server's answer has another form; is it a Raydix server of this version?") from None
    for line in shown:
        typer.echo(printable(line))


def lines(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield a model's versions and its rollout as lines of text."""
    weights = model.get("weights")
    shares = (
        [f"{name} {_percent(weight)}" for name, weight in weights.items()] if isinstance(weights, dict) else []
    )
    yield f"{model.get('model')}: {', '.join(shares)}"
    rollout = model.get("rollout")
    if not isinstance(rollout, dict):
        return
    steps = rollout.get("steps") or []
    parts = [
        f"rollout of {rollout.get('version')}: {rollout.get('state')}, step {rollout.get('step')} of {len(steps)}"
    ]
    if (held := number(rollout.get("held_s"))) is not None:
        parts.append(f"held {held:.0f} of {rollout.get('hold_s'):g} s, {rollout.get('num_requests')} requests")
    yield f"  {', '.join(parts)}"
    measured, limits = rollout.get("measured") or {}, rollout.get("limits") or {}
    for name, value in measured.items():
        limit = limits.get(name)
        most = "no limit" if limit is None else f"at most {limit:g}"
        yield f"  {name}: {'-' if value is None else f'{value:.4g}'} ({most})"
    if reason := text(rollout.get("reason")):
        yield f"  {reason}"


def _percent(weight: object) -> str:
    share = number(weight)
    return "-" if share is None else f"{share * 100:g} %"
