"""A real Prometheus under load: what dashboards and alerts ask is understood, and what should be there is."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.private_ray import free_port
from monitoring.metric_table import METRICS, PREFIX
from monitoring.rules import RULES, load_rules
from tests.e2e.conftest import Service
from tests.monitoring.support.queries import Query, alert_queries, dashboard_queries

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (Debian's package)"
    ),
]

PATIENCE_S = 240.0
QUERIES = [*dashboard_queries(), *alert_queries()]
RARE = re.compile("recompute|kv_page_(lifetime|idle)|migration_gap|waiting_prefill_tokens")
"""What the load here may never cause. Quotients of it have a series, but its value is 0/0."""


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API. AssertionError when it is an error."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=60).json()
        assert answer["status"] == "success", f"{parameters}: {answer['error']}"
        return answer["data"]

    def ask(self, expr: str) -> list[float]:
        """The values of an expression now."""
        return [float(series["value"][1]) for series in self.get("query", query=expr)["result"]]


def until(holds: Callable[[], bool], what: Callable[[], object]) -> None:
    """Wait until `holds`; `what` says what is wrong when it does not in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"after {PATIENCE_S:.0f} s: {what()}"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A server configured as in `monitoring/prometheus.yml`, but quicker, and for these tests' application."""
    directory = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((RULES.parents[1] / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [service.url.removeprefix("http://")]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(_command(directory, address), stdout=log, stderr=log)
        try:
            running = Prometheus(f"http://{address}")
            until(lambda: _is_ready(running, process), (directory / "log").read_text)
            yield running
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _command(directory: Path, address: str) -> list[str]:
    return [
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]


def _is_ready(server: Prometheus, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "prometheus ended"
    try:
        return httpx.get(f"{server.url}/-/ready", timeout=5).is_success
    except httpx.TransportError:
        return False


class Load:
    """Requests of several kinds, again and again, each kind in a thread of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
        self._is_over = threading.Event()
        self.done: Counter[str] = Counter()
        """Requests by kind that went as meant."""
        kinds = (self.whole, self.streamed, self.aborted, self.refused)
        self._threads = [threading.Thread(target=self._repeat, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def whole(self, client: httpx.Client) -> bool:
        """A completion whose prompt is found in the cache."""
        body = {"model": self._model, "prompt": "What does itertools.chain do? " * 4, "max_tokens": 8}
        return client.post("/v1/completions", json=body).is_success

    def streamed(self, client: httpx.Client) -> bool:
        """A chat whose prompt is new."""
        answer = client.post("/v1/chat/completions", json=self._chat(f"{self.done} {time.time()}", 24))
        return answer.text.rstrip().endswith("[DONE]")

    def aborted(self, client: httpx.Client) -> bool:
        """A stream whose client leaves after the first line."""
        with client.stream("POST", "/v1/chat/completions", json=self._chat("Tell me of heapq.", 500)) as answer:
            return bool(next(answer.iter_lines()))

    def refused(self, client: httpx.Client) -> bool:
        """A request for a model that is not here."""
        return client.post("/v1/completions", json={"model": "no-such", "prompt": "?"}).status_code == 404

    def _chat(self, text: str, max_tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }

    def _repeat(self, kind: Callable[[httpx.Client], bool]) -> None:
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._is_over.wait(0.1):
                if kind(client):
                    self.done[kind.__name__] += 1


@pytest.fixture(scope="module")
def load(service: Service, prometheus: Prometheus) -> Iterator[Load]:
    """Load that runs during all tests here, and is scraped."""
    until(lambda: prometheus.ask('up{job="raydix"}') == [1.0], lambda: prometheus.get("targets"))
    with Load(service.url) as running:
        until(lambda: len(running.done) == 4, lambda: running.done)
        yield running


@pytest.mark.usefixtures("load")
def test_every_query_is_understood_and_those_that_should_have_data_have_it(prometheus: Prometheus) -> None:
    for query in QUERIES:
        prometheus.ask(query.expr)
    missing = [query for query in QUERIES if query.expects_data]
    assert len(missing) > len(METRICS) / 2

    def has_data(query: Query) -> bool:
        values = prometheus.ask(query.expr)
        return bool(values) and (RARE.search(query.expr) is not None or any(map(math.isfinite, values)))

    def all_have() -> bool:
        # No longer missing once it was there: some are about what happens now and then.
        missing[:] = [query for query in missing if not has_data(query)]
        return not missing

    until(all_have, lambda: "no data for\n" + "\n".join(f"{query.source}: {query.expr}" for query in missing))


@pytest.mark.usefixtures("load")
def test_every_counter_has_a_rate(prometheus: Prometheus) -> None:
    for metric in METRICS:
        if metric.kind == "counter":
            rates = prometheus.ask(f"rate({PREFIX}{metric.name}[1m])")
            assert all(math.isfinite(rate) and rate >= 0 for rate in rates), metric.name
            assert rates or None in metric.labels.values(), metric.name


@pytest.mark.usefixtures("load")
def test_every_rule_is_evaluated_and_the_metrics_are_not_absent(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in rules()), rules)
    assert {rule["name"] for rule in rules()} == {rule.name for rule in load_rules()}
    assert [rule for rule in rules() if rule["health"] != "ok"] == []
    assert prometheus.ask('ALERTS{alertname="RaydixMetricsAbsent",alertstate="firing"}') == []
