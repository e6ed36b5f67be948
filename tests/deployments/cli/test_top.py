"""`raydix top`: from recorded pages to values, from values to screens, and screens without any values."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli import top as cli
from deployments.cli.app import app
from deployments.cli.errors import UserError
from deployments.cli.top_client import ServerReading, TopClient
from deployments.cli.top_state import TopView, ViewBuilder
from deployments.cli.top_view import Outage, Screen
from deployments.telemetry.scrape import MetricsPage
from monitoring.hub import Hub
from monitoring.metric_table import BY_NAME
from monitoring.metrics import Metrics

URL = "http://127.0.0.1:8000"
RUNNER = CliRunner()


def labels(name: str, **chosen: str) -> dict[str, str]:
    """`chosen`, and the first value of every other closed label."""
    return {key: chosen.get(key, (values or ("?",))[0]) for key, values in BY_NAME[name].labels.items()}


class Recorded:
    """A service of a few engine replicas and an ingress, through the real hub."""

    def __init__(self, *engines: str, model: str = "demo") -> None:
        self.model, self.hub, self.now = model, Hub(), 0.0
        self.engines = {name: Metrics(model, name, "engine") for name in engines}
        self.ingress = Metrics(model, "ingress-1", "ingress")
        self.up = list(engines)
        for engine in self.engines.values():
            self.set(engine, "kv_pages_capacity", 100)
            for state, pages in (("free", 20), ("active", 50), ("cached", 30)):
                self.set(engine, "kv_pages", pages, state=state)

    def set(self, metrics: Metrics, name: str, value: float, **chosen: str) -> None:
        metrics.set(name, value, **labels(name, **chosen))

    def inc(self, metrics: Metrics, name: str, value: float, **chosen: str) -> None:
        metrics.inc(name, value, **labels(name, **chosen))

    def health(self) -> dict[str, Any]:
        replicas = [
            {"replica": name, "is_connected": True, "heartbeat_age_s": 0.02, "num_running": 3, "num_waiting": 1}
            for name in self.up
        ]
        summary = {"status": "healthy", "replicas_up": len(self.up), "replicas_expected": len(self.engines)}
        return {**summary, "replicas": replicas, "models": {self.model: summary}}

    def text(self) -> str:
        for name in self.up:
            self.hub.push(name, self.engines[name].snapshot(), self.now)
        self.hub.push("ingress", self.ingress.snapshot(), self.now)
        return self.hub.render(self.now).decode()

    def read(self, seconds: float = 0.0, **changes: Any) -> ServerReading:
        self.now += seconds
        reading = ServerReading(1.7e9 + self.now, self.now, MetricsPage.parse(self.text()), self.health())
        return replace(reading, **changes)


def test_rates_and_quantiles_are_those_of_the_interval() -> None:
    service, watch = Recorded("r1", "r2"), ViewBuilder(URL)
    service.inc(service.engines["r1"], "generation_tokens_total", 99_999)
    service.ingress.observe("time_to_first_token_seconds", 90.0, count=1000)
    watch.see(service.read())
    r1, ingress = service.engines["r1"], service.ingress
    service.inc(r1, "generation_tokens_total", 400)
    service.inc(r1, "prompt_tokens_total", 600, source="computed")
    service.inc(r1, "prefix_cache_query_tokens_total", 1000)
    service.inc(r1, "prefix_cache_hit_tokens_total", 400)
    service.inc(r1, "preemptions_total", 2)
    service.inc(ingress, "requests_total", 8)
    service.inc(ingress, "request_errors_total", 1, status="503")
    service.inc(ingress, "admission_rejections_total", 3, reason="queue_full")
    ingress.observe("time_to_first_token_seconds", 0.15, count=100)
    ingress.observe("inter_token_latency_seconds", 0.0045, count=100)
    view = watch.see(service.read(2.0))
    [model] = view.models
    assert (model.model, model.status, model.replicas_up) == ("demo", "healthy", 2)
    assert (model.requests_per_s, model.generated_tokens_per_s, model.prefill_tokens_per_s) == (4, 200, 300)
    assert model.hit_rate == pytest.approx(0.4)
    assert model.ttft_p50_s is not None and 0.1 < model.ttft_p50_s <= 0.2
    assert model.itl_p99_s is not None and 0.003 < model.itl_p99_s <= 0.005
    busy, idle = view.replicas
    assert (busy.replica, busy.state, busy.model, busy.running, busy.waiting) == ("r1", "up", "demo", 3, 1)
    assert (busy.decode_tokens_per_s, busy.prefill_tokens_per_s, busy.preemptions) == (200, 300, 2)
    assert (busy.kv_pages_free, busy.kv_pages_active, busy.kv_pages_cached) == (20, 50, 30)
    assert (idle.decode_tokens_per_s, idle.hit_rate, idle.preemptions) == (0, None, 0)
    assert (view.service.errors, view.service.errors_by_status) == (1, {"503": 1})
    assert (view.service.rejections, view.service.rejections_by_reason) == (3, {"queue_full": 3})
    assert view.interval_s == 2.0


def test_the_first_view_counts_since_the_start_and_has_no_rates() -> None:
    service = Recorded("r1")
    service.inc(service.engines["r1"], "generation_tokens_total", 50)
    service.inc(service.ingress, "admission_rejections_total", 3)
    view = ViewBuilder(URL).see(service.read())
    assert view.interval_s is None and view.service.rejections == 3
    assert view.models[0].generated_tokens_per_s is view.replicas[0].decode_tokens_per_s is None
    assert "since start" in shown(Screen(URL, view))


def test_rates_look_back_over_some_seconds_because_processes_report_once_a_second() -> None:
    service, watch = Recorded("r1"), ViewBuilder(URL)
    rates = []
    for second in range(12):
        # Two seconds' work is reported every other second.
        service.inc(service.engines["r1"], "generation_tokens_total", 200 * (second % 2))
        view = watch.see(service.read(1.0))
        rates.append(view.replicas[0].decode_tokens_per_s)
    assert view.interval_s == 5.0
    assert all(rate is not None and 80 <= rate <= 120 for rate in rates[6:])
    assert watch.see(service.read(30.0)).interval_s == 30.0


def test_a_replica_that_vanishes_is_gone_for_a_while_and_then_forgotten() -> None:
    service, watch = Recorded("r1", "r2"), ViewBuilder(URL)
    watch.see(service.read())
    service.up.remove("r2")
    for seconds in (1.0, 30.0):  # on the page at first, with its last gauges; then no longer
        view = watch.see(service.read(seconds))
        assert [(r.replica, r.state) for r in view.replicas] == [("r2", "gone"), ("r1", "up")]
        assert view.replicas[0].model == "demo" and view.replicas[0].running is None
    assert [r.replica for r in watch.see(service.read(60.0)).replicas] == ["r1"]
    service.up.append("r2")
    assert [(r.replica, r.state) for r in watch.see(service.read(1.0)).replicas] == [("r1", "up"), ("r2", "up")]


def test_states_come_from_heartbeats_first_and_from_serve_where_there_are_none() -> None:
    service, watch = Recorded("a", "b", "c", "d"), ViewBuilder(URL)
    health = service.health()
    health["replicas"] = [
        {"replica": "a", "is_connected": True, "is_draining": True},
        {"replica": "b", "is_connected": False, "heartbeat_age_s": 7.5},
        {"replica": "c", "is_connected": True},
    ]
    starting = {"replica": "e", "state": "STARTING"}
    status = {"models": [{"id": "demo", "replicas": [starting, {"replica": "b", "state": "RUNNING"}]}]}
    view = watch.see(service.read(health=health, status=status))
    states = {replica.replica: replica.state for replica in view.replicas}
    assert states == {"a": "draining", "b": "lost", "c": "up", "d": "unknown", "e": "starting"}
    assert view.replicas[-1].replica == "c", "what needs attention comes first"
    assert {r.model for r in view.replicas} == {"demo"}


def test_without_health_no_replica_is_declared_gone() -> None:
    service, watch = Recorded("r1"), ViewBuilder(URL)
    watch.see(service.read())
    view = watch.see(service.read(1.0, health={}))
    assert [(r.replica, r.state) for r in view.replicas] == [("r1", "unknown")]
    assert view.service.status is None and view.models[0].model == "demo"


def test_decisions_show_the_prediction_and_the_outcome() -> None:
    record = {
        "request_id": "cmpl-1", "at": 1.7e9, "model": "demo", "reason": "holder", "num_tokens": 600,
        "replica": "r1", "predicted_cached": 512, "actual_cached": None, "terms": {"r1": {"total": 0.25}},
        "predicted_tiers": {"device": 384, "host": 128},
    }  # fmt: skip
    view = ViewBuilder(URL).see(Recorded("r1").read(decisions=[record]))
    assert view.decisions is not None
    [decision] = view.decisions
    assert (decision.predicted_cached_tokens, decision.found_cached_tokens, decision.cost_s) == (512, None, 0.25)
    assert decision.predicted_host_tokens == 128
    assert "holder" in shown(Screen(URL, view))
    record["predicted_tiers"] = "of an older ingress"
    view = ViewBuilder(URL).see(Recorded("r1").read(decisions=[record]))
    assert view.decisions is not None and view.decisions[0].predicted_host_tokens is None


def test_versions_show_their_share_and_the_state_of_their_rollout() -> None:
    service, plain = Recorded("r1", model="chat@v2"), Recorded("r1")
    of_version = {"model": "chat", "version": "v2"}
    service.hub.own.set("version_weight", 0.1, **of_version)
    service.hub.own.set("version_weight", 0.9, model="chat", version="v1")
    for state in ("running", "rolled_back"):
        service.hub.own.set("rollout_state", float(state == "rolled_back"), state=state, **of_version)
    view = ViewBuilder(URL).see(service.read())
    [model] = view.models
    assert (model.model, model.session_share, model.rollout) == ("chat@v2", 0.1, "rolled_back")
    assert "share" in shown(Screen(URL, view)) and "10%" in shown(Screen(URL, view))
    assert "rolled_back" in shown(Screen(URL, view), width=140)
    assert "share" not in shown(Screen(URL, ViewBuilder(URL).see(plain.read())))


# --- screens -----------------------------------------------------------------------------------------------------


def shown(screen: Screen, width: int = 80, height: int = 24, encoding: str = "utf-8") -> str:
    """Return what a console of that size prints, checking that it stays within it."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=file, width=width, height=height, color_system=None, legacy_windows=False)
    console.print(screen)
    file.flush()
    text = raw.getvalue().decode(encoding)
    assert max(map(cell_len, text.splitlines()), default=0) <= width
    if screen.fits_height:
        assert len(text.splitlines()) <= height
    return text


@cache
def crowded(replicas: int, decisions: int) -> TopView:
    service = Recorded(
        *(f"EngineReplica#{i:08x}" for i in range(replicas)), model="meta-llama/Llama-3.1-8B-Instruct"
    )
    watch = ViewBuilder(URL)
    watch.see(service.read())
    for engine in service.engines.values():
        service.inc(engine, "generation_tokens_total", 123_456_789)
        service.inc(engine, "preemptions_total", 12_345)
    for status in ("400", "404", "429", "500", "503"):
        service.inc(service.ingress, "request_errors_total", 1e6, status=status)
    records = [
        {"at": 1.7e9 + i, "reason": "none_available", "replica": "EngineReplica#00000001", "num_tokens": 10**6,
         "request_id": "chatcmpl-" + "x" * 200}
        for i in range(decisions)
    ]  # fmt: skip
    return watch.see(service.read(1.0, decisions=records, hidden={"cluster status": "failed " * 40}))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (110, 30), (60, 10), (30, 3)])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("replicas", [0, 1, 64])
def test_a_screen_never_overflows(width: int, height: int, encoding: str, replicas: int) -> None:
    view = crowded(replicas, decisions=50)
    for away in (None, Outage(1.7e9, 1.7e9 + 90, "connection refused " * 20)):
        screen = Screen(URL, view, away, fits_height=True)
        assert shown(screen, width, height, encoding).startswith("raydix")


def test_a_screen_of_80_columns_shows_replicas_decisions_and_the_number_hidden() -> None:
    text = shown(Screen(URL, crowded(64, decisions=50), fits_height=True))
    lines = text.splitlines()
    assert len(lines) == 24
    assert any(line.startswith("replica 9/64") or "/64" in line for line in lines)
    assert sum("none_available" in line for line in lines) == 3
    assert "hidden: cluster status" in lines[-1]
    row = next(line for line in lines if line.startswith("0000000"))
    assert "50%" in row and "█" in row and "▒" in row and "░" in row and "123M" in row


def test_a_bar_can_be_read_without_colours_and_without_unicode() -> None:
    text = shown(Screen(URL, crowded(1, 0)), encoding="ascii")
    [row] = [line for line in text.splitlines() if line.startswith("00000000")]
    assert row.count("#") > row.count("=") > row.count(".") - 1 > 0


def test_text_of_a_server_does_not_drive_the_terminal() -> None:
    evil = "\x1b[2J\x07" + "m"
    service = Recorded("r1\x1b]0;x\x07")
    health = {**service.health(), "models": {evil: {"status": evil}}, "status": evil}
    view = ViewBuilder(URL).see(service.read(health=health, hidden={"x": evil}, decisions=[{"reason": evil}]))
    assert "\x1b" not in shown(Screen(URL, view)) and "\x07" not in shown(Screen(URL, view, Outage(0, 1, evil)))


def test_a_server_that_went_away_is_shown_with_since_when_and_why() -> None:
    view = crowded(2, 0)
    text = shown(Screen(URL, view, Outage(1.7e9, 1.7e9 + 42, "connection refused")))
    assert "(42 s), trying again: connection refused" in text and "00000001" in text
    without_view = Screen(URL, None, Outage(1.7e9, 1.7e9, "connection refused"))
    assert "trying again: connection refused" in shown(without_view)


odd = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.just(10**400), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
replica_like = st.fixed_dictionaries(
    {"replica": odd}, optional={"is_connected": odd, "heartbeat_age_s": odd, "num_running": odd, "state": odd}
)
health_like = st.fixed_dictionaries(
    {}, optional={"status": odd, "models": odd, "replicas": st.one_of(odd, st.lists(replica_like, max_size=3))}
)
record_like = st.fixed_dictionaries({}, optional={"at": odd, "replica": odd, "terms": odd, "num_tokens": odd})


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf"), True, "1", None, [1]])
def test_a_value_that_cannot_be_a_measurement_is_not_shown(value: object) -> None:
    service = Recorded("r1")
    health = service.health()
    health["replicas"][0]["heartbeat_age_s"] = value
    view = ViewBuilder(URL).see(service.read(health=health))
    assert view.replicas[0].heartbeat_age_s is None
    shown(Screen(URL, view))


@settings(max_examples=60, deadline=None)
@given(
    health_like,
    st.one_of(st.none(), health_like),
    st.lists(st.one_of(odd, record_like), max_size=3),
    st.lists(st.sampled_from(sorted(BY_NAME)), max_size=6),
    st.sampled_from(["NaN", "+Inf", "-Inf", "-1", "0", "1e300"]),
)
@example({"models": {"\U000e0000": None}}, None, [], [], "NaN")  # a character that takes no cell
def test_odd_answers_and_missing_families_make_a_view_a_screen_and_a_document(
    health: dict[str, Any], status: Any, decisions: list[Any], names: list[str], value: str
) -> None:
    lines = [f'raydix_{name}{{replica="r",model_name="m",le="1",state="free"}} {value}' for name in set(names)]
    page = MetricsPage.parse("\n".join([*lines, ""]))
    watch = ViewBuilder(URL)
    for clock in (0.0, 0.0, 1.0):
        view = watch.see(ServerReading(clock, clock, page, health, status, decisions, {}))
    shown(Screen(URL, view, fits_height=True), 80, 24)
    shown(Screen(URL, view), 200, 60)
    json.dumps(view.as_json(), allow_nan=False)


# --- the command -------------------------------------------------------------------------------------------------


def served(handler: Callable[[httpx.Request], httpx.Response], key: str | None = None) -> TopClient:
    return TopClient(URL, key, httpx.MockTransport(handler))


def once(source: TopClient) -> dict[str, Any]:
    """The document of --once --json."""
    output = io.StringIO()
    cli.Top(source, Console(file=output, width=80), as_json=True).once(0.0)
    document: dict[str, Any] = json.loads(output.getvalue())
    return document


def test_once_prints_one_document_with_all_keys() -> None:
    service = Recorded("r1")

    def handler(request: httpx.Request) -> httpx.Response:
        assert "authorization" not in request.headers and request.url.path in ("/metrics", "/health")
        service.now += 1
        return httpx.Response(200, text=service.text()) if request.url.path == "/metrics" else httpx.Response(
            200, json=service.health()
        )  # fmt: skip

    document = once(served(handler))
    assert list(document) == [
        "url", "at_unix_s", "interval_s", "service", "models", "replicas", "decisions", "hidden", "away"
    ]  # fmt: skip
    assert document["interval_s"] > 0 and document["away"] is None and document["decisions"] is None
    assert document["replicas"][0]["kv_pages_active"] == 50
    assert document["hidden"].keys() == {"cluster status", "router decisions"}
    assert "--key-env" in document["hidden"]["router decisions"]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            httpx.Response(401, json={"error": {"message": "No key."}}),
            r"/metrics is protected: No key\. Give --key",
        ),
        (httpx.Response(200, text="python_info 1.0\n"), "not a Raydix server"),
        (httpx.Response(200, text="<html>hello</html>"), "not a Raydix server"),
        (httpx.Response(200, content=b"\xff\xfe\x00{"), "not a Raydix server"),
        (httpx.Response(404), "not a Raydix server"),
        (httpx.Response(503), "HTTP 503 instead of metrics"),
    ],
)
def test_once_fails_with_a_reason(response: httpx.Response, message: str) -> None:
    with pytest.raises(UserError, match=message) as failed:
        once(served(lambda _: response))
    assert failed.value.exit_code != 0 and str(failed.value).startswith(URL)


def test_a_closed_port_a_bad_url_and_bad_keys_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYDIX_ADMIN_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
    for arguments, message in (
        (["--once", "--url", closed], "is `raydix serve` running there"),
        (["--once", "--url", "nowhere"], "not the URL of a server"),
        (["--once", "--url", "http://[::1"], "is not a URL"),
        (["--url", "nowhere"], "not the URL of a server"),
        (["--key-env", "NO_SUCH_VARIABLE"], "not set or empty"),
        (["--key", "a b"], "visible ASCII"),
        (["--key", "a", "--key-env", "B"], "cannot be combined"),
    ):
        with pytest.raises(UserError, match=f"(?i){message}"):
            RUNNER.invoke(app, ["top", *arguments], catch_exceptions=False)


def test_following_continues_when_the_server_leaves_and_returns_and_ends_at_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, script = Recorded("r1"), iter(["refuse", "answer", "refuse", "refuse", "answer"])

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/metrics":
            return httpx.Response(200, json=service.health())
        if next(script) == "refuse":
            raise httpx.ConnectError("connection refused")
        service.now += 1
        return httpx.Response(200, text=service.text())

    def sleep(_: float) -> None:
        if lines().count("\n") == 5:
            raise KeyboardInterrupt

    output = io.StringIO()
    lines = output.getvalue
    monkeypatch.setattr("deployments.cli.top.time.sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        cli.Top(served(handler), Console(file=output, width=80), as_json=True).follow(1.0)
    documents = [json.loads(line) for line in lines().splitlines()]
    assert [document["away"] is not None for document in documents] == [True, False, True, True, False]
    assert documents[2]["away"]["since"] == documents[3]["away"]["since"] <= documents[3]["away"]["now"]
    assert "models" not in documents[0] and documents[3]["models"] == documents[1]["models"]


def test_in_a_terminal_ctrl_c_leaves_the_other_screen_and_exits_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Recorded("r1")
    output = io.StringIO()

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    def handler(request: httpx.Request) -> httpx.Response:
        is_page = request.url.path == "/metrics"
        return httpx.Response(200, text=service.text()) if is_page else httpx.Response(200, json=service.health())

    console = Console(file=output, force_terminal=True, width=80, height=24)
    monkeypatch.setattr(cli, "Console", lambda: console)
    monkeypatch.setattr(cli, "TopClient", lambda url, key: served(handler))
    monkeypatch.setattr("deployments.cli.top.time.sleep", interrupt)
    cli.run(URL, None, None, 1.0, once=False, as_json=False)  # returns: exit code 0
    entered, left = output.getvalue().find("\x1b[?1049h"), output.getvalue().rfind("\x1b[?1049l")
    assert 0 <= entered < output.getvalue().find("replica") < left
    assert output.getvalue().rfind("\x1b[?25h") > output.getvalue().rfind("\x1b[?25l"), "the cursor is back"
