"""`raydix dashboards`: publish dashboards and alert rules to a Grafana, or write them as files.

Imports neither Ray nor torch nor pydantic: it runs in an environment that has only Grafana's client.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.errors import UserError, with_file

app = typer.Typer(
    help="Grafana dashboards and alert rules: publish them, or write them as files.", no_args_is_help=True
)

TOKEN_ENV = "GRAFANA_TOKEN"
RulesOption = Annotated[
    Path | None,
    typer.Option(help="A Prometheus rule file to take the alerts from.", show_default="Raydix' own"),
]


@app.command()
def push(
    url: Annotated[str, typer.Option(help="URL of Grafana, e.g. https://grafana.example.com.")],
    token: Annotated[
        str | None,
        typer.Option(
            help="A service account's token; other users can see it in the process list.", show_default=False
        ),
    ] = None,
    token_env: Annotated[str, typer.Option(help="Environment variable that has the token.")] = TOKEN_ENV,
    folder: Annotated[str, typer.Option(help="Title of the folder.")] = "Raydix",
    prometheus_url: Annotated[
        str | None,
        typer.Option(
            help="URL at which Grafana's server reaches Prometheus.",
            show_default="the datasource's, or http://localhost:9090 for a new one",
        ),
    ] = None,
    datasource: Annotated[
        str | None,
        typer.Option(help="Uid of an existing Prometheus datasource to use.", show_default=False),
    ] = None,
    rules: RulesOption = None,
    force: Annotated[bool, typer.Option(help="Overwrite dashboards that were edited in Grafana.")] = False,
) -> None:
    """Publish datasource, folder, dashboards and alert rules. Unchanged objects are not written."""
    from monitoring.grafana.client import GrafanaError

    token = token or os.environ.get(token_env)
    if not token:
        raise UserError(
            f"no token: put a service account's token into {token_env}, or name a variable with --token-env", 2
        )
    if datasource and prometheus_url:
        raise UserError("--datasource names an existing datasource, so --prometheus-url must be left out", 2)
    try:
        _push(url, token, folder, prometheus_url, datasource, rules, force)
    except GrafanaError as error:
        raise UserError(str(error)) from None
    except (ValueError, OSError) as error:
        raise UserError(with_file(error)) from None


def _push(
    url: str,
    token: str,
    folder: str,
    prometheus_url: str | None,
    datasource: str | None,
    rules: Path | None,
    force: bool,
) -> None:
    from monitoring.grafana import files
    from monitoring.grafana.client import Grafana
    from monitoring.grafana.names import DATASOURCE_UID, FOLDER_UID
    from monitoring.grafana.publish import Published, Publisher
    from monitoring.grafana.rules import rule_group
    from monitoring.rules import RULES

    # Read the rules first, so that a wrong file is reported before anything is written.
    alerts = rule_group(rules or RULES, datasource_uid=datasource or DATASOURCE_UID, folder_uid=FOLDER_UID)
    grafana = Grafana(url, token)
    grafana.check()
    publisher, published = Publisher(grafana), list[Published]()

    def tell(one: Published) -> None:
        published.append(one)
        print(f"{one.kind:<12} {one.name:<24} {one.outcome}")

    source = publisher.existing_datasource(datasource) if datasource else files.datasource(prometheus_url)
    if not datasource:
        tell(publisher.datasource(source))
    tell(publisher.folder(folder))
    for dashboard in files.dashboards():
        tell(publisher.dashboard(files.using(dashboard, source["uid"], source["name"]), force=force))
    tell(publisher.rules(alerts))
    count = sum(one.outcome != "no change" for one in published)
    print(f"{grafana.url}: {count} written" if count else f"{grafana.url}: no change")


@app.command()
def write(
    directory: Annotated[Path, typer.Argument(help="Directory to write to; created if it does not exist.")],
    rules: RulesOption = None,
) -> None:
    """Write the files for Grafana's provisioning: dashboards, datasource and alert rules."""
    from monitoring.grafana import files
    from monitoring.rules import RULES

    try:
        for path in files.write(directory, rules or RULES):
            print(path)
    except (ValueError, OSError) as error:
        raise UserError(with_file(error)) from None
