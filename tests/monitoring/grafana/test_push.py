"""`raydix dashboards push`, as it is run: in its own environment, against a server with Grafana's rules."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.monitoring.support.fake_grafana import FakeGrafana

ROOT = Path(__file__).parents[3]
RULES = Path(__file__).with_name("rules.yaml")
PYTHON = ROOT / ".venv-grafana" / "bin" / "python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"{PYTHON.parents[1].name} is missing: make .venv-grafana/.installed"
)
Push = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def grafana() -> FakeGrafana:
    return FakeGrafana()


@pytest.fixture
def push(grafana: FakeGrafana) -> Iterator[Push]:
    """Runs the command against the fake server with an administrator's token."""
    url = grafana.start()

    def run(*options: str, token: str = "admin-token", to: str = url) -> subprocess.CompletedProcess[str]:
        return cli("dashboards", "push", "--url", to, "--rules", str(RULES), *options, token=token)

    yield run
    grafana.stop()


def cli(*arguments: str, token: str = "", python: Path = PYTHON) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GRAFANA_TOKEN": token, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [str(python), "-m", "deployments.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)


def test_the_first_push_makes_everything_and_the_second_writes_nothing(grafana: FakeGrafana, push: Push) -> None:
    first = push("--prometheus-url", "http://prometheus:9090")
    assert first.returncode == 0, first.stderr
    assert grafana.datasources["raydix-prometheus"]["url"] == "http://prometheus:9090"
    assert grafana.folders["raydix"]["title"] == "Raydix"
    assert set(grafana.dashboards) == {"raydix-overview", "raydix-engine", "raydix-router", "raydix-tenants"}
    assert grafana.groups["raydix", "raydix"]["rules"][0]["title"] == "Waiting"
    assert "7 written" in first.stdout
    written = len(grafana.writes)
    second = push("--prometheus-url", "http://prometheus:9090")
    assert second.returncode == 0, second.stderr
    assert len(grafana.writes) == written == 7
    assert second.stdout.splitlines()[-1].endswith(": no change")


def test_only_changed_objects_are_written(grafana: FakeGrafana, push: Push) -> None:
    """After an update of Raydix, one dashboard is an older one of ours, and a rule has changed."""
    assert push().returncode == 0
    older = grafana.dashboards["raydix-engine"][-1]["dashboard"]
    older["panels"][1]["title"] = "An older title"
    grafana.groups["raydix", "raydix"]["rules"][0]["data"][0]["model"]["expr"] = "vector(0)"
    before = len(grafana.writes)
    done = push()
    assert done.returncode == 0, done.stderr
    assert grafana.writes[before:] == ["/dashboards/db", "/v1/provisioning/folder/raydix/rule-groups/raydix"]
    assert grafana.dashboards["raydix-engine"][-1]["dashboard"]["version"] == 2
    assert grafana.dashboards["raydix-engine"][-1]["dashboard"]["panels"][1]["title"] != "An older title"
    assert "2 written" in done.stdout


def test_settings_of_others_on_the_datasource_stay(grafana: FakeGrafana, push: Push) -> None:
    assert push("--prometheus-url", "http://one:9090").returncode == 0
    theirs = grafana.datasources["raydix-prometheus"]
    theirs.update(basicAuth=True, isDefault=True, jsonData={**theirs["jsonData"], "timeInterval": "5s"})
    assert push("--prometheus-url", "http://two:9090").returncode == 0
    now = grafana.datasources["raydix-prometheus"]
    assert (now["url"], now["basicAuth"], now["isDefault"]) == ("http://two:9090", True, True)
    assert now["jsonData"] == {"httpMethod": "POST", "timeInterval": "5s"}
    before = len(grafana.writes)
    assert push().returncode == 0 and len(grafana.writes) == before, "no --prometheus-url: the URL stays"
    assert now["url"] == "http://two:9090"


def test_an_edit_in_grafana_is_not_overwritten_unless_forced(grafana: FakeGrafana, push: Push) -> None:
    assert push().returncode == 0
    grafana.edit("raydix-router", title="Alice's router")
    refused = push()
    assert refused.returncode == 1
    assert "'Raydix: Router' was edited in Grafana (version 2, by alice)" in refused.stderr
    assert "--force" in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert grafana.dashboards["raydix-router"][-1]["dashboard"]["title"] == "Alice's router"
    assert push("--force").returncode == 0
    assert grafana.dashboards["raydix-router"][-1]["dashboard"]["title"] == "Raydix: Router"


def test_a_save_between_reading_and_writing_is_noticed(grafana: FakeGrafana, push: Push) -> None:
    """After a 412 the dashboard is read again, and what was saved in between is an edit like others."""
    assert push().returncode == 0
    grafana.dashboards["raydix-engine"][-1]["dashboard"]["panels"] = []
    edits = iter(["once"])
    grafana.before_write = lambda uid: grafana.edit(uid, "Alice's") if next(edits, None) else None
    refused = push()
    assert refused.returncode == 1 and "was edited in Grafana (version 2, by alice)" in refused.stderr
    assert grafana.dashboards["raydix-engine"][-1]["dashboard"]["title"] == "Alice's"


def test_a_dashboard_that_never_stops_changing_is_given_up_on(grafana: FakeGrafana, push: Push) -> None:
    assert push().returncode == 0
    grafana.dashboards["raydix-engine"][-1]["dashboard"]["panels"] = []
    grafana.before_write = lambda uid: grafana.edit(uid, "Alice's")
    refused = push("--force")
    assert refused.returncode == 1
    assert "refuses the dashboard 'Raydix: Engine' twice" in refused.stderr and "try again" in refused.stderr


def test_a_foreign_dashboard_of_the_same_name_is_not_changed(grafana: FakeGrafana, push: Push) -> None:
    assert push().returncode == 0
    theirs = grafana.dashboards.pop("raydix-engine")
    theirs[-1]["dashboard"]["uid"] = "theirs"
    grafana.dashboards["theirs"] = theirs
    refused = push()
    assert refused.returncode == 1 and "another one has its name" in refused.stderr


def test_a_datasource_that_exists_can_be_used(grafana: FakeGrafana, push: Push) -> None:
    grafana.datasources["mimir"] = {"uid": "mimir", "name": "Mimir", "type": "prometheus", "version": 1}
    done = push("--datasource", "mimir", "--folder", "LLMs")
    assert done.returncode == 0, done.stderr
    assert set(grafana.datasources) == {"mimir"} and grafana.folders["raydix"]["title"] == "LLMs"
    chosen = grafana.dashboards["raydix-engine"][-1]["dashboard"]["templating"]["list"][0]["current"]
    assert (chosen["text"], chosen["value"]) == ("Mimir", "mimir")
    rule = grafana.groups["raydix", "raydix"]["rules"][0]
    assert [step["datasourceUid"] for step in rule["data"]] == ["mimir", "__expr__", "__expr__"]
    assert "1 written" in push("--datasource", "mimir", "--folder", "Models").stdout
    missing = push("--datasource", "loki")
    assert missing.returncode == 1 and "--datasource loki: there is no such datasource" in missing.stderr


def test_a_grafana_below_a_path() -> None:
    fake = FakeGrafana(prefix="/grafana")
    url = fake.start()
    try:
        done = cli("dashboards", "push", "--url", f"{url}/", "--rules", str(RULES), token="admin-token")
        assert done.returncode == 0, done.stderr
        wrong = url.removesuffix("/grafana")
        page = cli("dashboards", "push", "--url", wrong, "--rules", str(RULES), token="admin-token")
        assert page.returncode == 1 and "does not answer like Grafana's API: check --url" in page.stderr
    finally:
        fake.stop()


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("stolen-secret", "does not accept the token"),
        ("viewer-token", "the token may not write the datasource"),
        ("editor-token", "the token may not write the datasource"),
    ],
)
def test_a_token_that_may_not(push: Push, token: str, message: str) -> None:
    """The token is never shown, though the server repeats it."""
    refused = push(token=token)
    assert refused.returncode == 1 and message in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert token not in refused.stderr + refused.stdout


def test_no_grafana_there() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        refused = cli("dashboards", "push", "--url", url, "--rules", str(RULES), token="admin-token")
    assert refused.returncode == 1 and f"cannot reach Grafana at {url}" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_https_where_there_is_none(push: Push, grafana: FakeGrafana) -> None:
    refused = push(to=f"https://127.0.0.1:{grafana.port}")
    assert refused.returncode == 1 and "no TLS connection" in refused.stderr, refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "token", "message"),
    [
        (["--url", "http://g"], "", "no token: put a service account's token into GRAFANA_TOKEN"),
        (["--url", "grafana"], "admin-token", "is not a URL such as"),
        (["--url", "http://me:secret@g"], "admin-token", "--url contains a password"),
        (["--url", "http://g", "--rules", "nowhere.yaml"], "admin-token", "nowhere.yaml"),
        (
            ["--url", "http://g", "--datasource", "x", "--prometheus-url", "y"],
            "admin-token",
            "must be left out",
        ),
    ],
)
def test_mistakes_are_reported_before_anything_is_sent(options: list[str], token: str, message: str) -> None:
    refused = cli("dashboards", "push", *options, token=token)
    assert refused.returncode in (1, 2) and message in refused.stderr
    assert len(refused.stderr.splitlines()) == 1 and "secret" not in refused.stderr


def test_without_the_client_the_message_says_how_to_get_it() -> None:
    """The client must not be installed in Ray's environment."""
    refused = cli("dashboards", "push", "--url", "http://g", token="admin-token", python=Path(sys.executable))
    assert refused.returncode == 1
    assert f"pip install -r {ROOT / 'monitoring' / 'grafana' / 'requirements.txt'}" in refused.stderr
    assert f"pip install --no-deps {ROOT}" in refused.stderr


def test_publishing_needs_neither_ray_nor_torch() -> None:
    """The publisher's environment has none of them, so that they cannot have been imported in the tests above."""
    for name in ("ray", "torch", "fastapi"):
        found = subprocess.run([str(PYTHON), "-c", f"import {name}"], capture_output=True, cwd="/")
        assert found.returncode != 0, name
