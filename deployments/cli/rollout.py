"""`raydix rollout`: show the versions of models and the rollouts of new ones, and control these."""

from __future__ import annotations

import json as json_module
from typing import Annotated
from urllib.parse import quote

import typer

from deployments.cli.api_key import given_key

app = typer.Typer(help="Versions of models: show and control the rollout of a new one.", no_args_is_help=True)

KEY_ENV = "RAYDIX_ADMIN_KEY"

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
    from deployments.cli.loose_json import objects
    from deployments.cli.rollout_client import ask, described

    document = ask("GET", url, "", given_key(key, key_env, KEY_ENV))
    if json:
        typer.echo(json_module.dumps(document))
        return
    shown = [line for model in objects(document.get("data")) for line in described(model)]
    typer.echo("\n".join(shown or ["No model has versions."]))


@app.command()
def pause(model: Model, url: Url = _LOCAL, key_env: KeyEnv = None, key: Key = None) -> None:
    """Let a rollout take no further step; it is still rolled back if the version exceeds a limit."""
    _order("pause", model, url, given_key(key, key_env, KEY_ENV))


@app.command()
def resume(model: Model, url: Url = _LOCAL, key_env: KeyEnv = None, key: Key = None) -> None:
    """Resume a paused rollout, or begin one again that was rolled back or aborted."""
    _order("resume", model, url, given_key(key, key_env, KEY_ENV))


@app.command()
def abort(model: Model, url: Url = _LOCAL, key_env: KeyEnv = None, key: Key = None) -> None:
    """Take all sessions from the new version, also after its rollout is done."""
    _order("abort", model, url, given_key(key, key_env, KEY_ENV))


def _order(action: str, model: str, url: str, key: str | None) -> None:
    from deployments.cli.rollout_client import ask, described

    typer.echo("\n".join(described(ask("POST", url, f"/{quote(model)}/{action}", key))))
