"""The rollout of a new version in the real application: its steps, an operator's orders, and the way back.

A step lasts until the new version has answered `ENOUGH` requests. The tests send it so many when they want the
next step, and count all others that they send it, so no step comes early.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from benchmarks.event_lines import EventLines
from tests.deployments.support.command_line import raydix
from tests.e2e.conftest import Service, running
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.e2e

KEY = "admin-key"
ADMIN = {"authorization": f"Bearer {KEY}"}
ENOUGH, STEPS = 40, (20, 60, 100)
SESSIONS = [f"session {number}" for number in range(20)]
"""Fewer than `ENOUGH`: one request of each ends no step."""


@dataclass(frozen=True)
class Part:
    """The part of a stream that came through one connection."""

    version: str
    text: str
    last_id: str


@dataclass
class Chat:
    """The model `chat`, whose version v2 is rolled out, and the requests that the tests sent it."""

    service: Service
    versions: list[str] = field(default_factory=list)
    """The version that gave each answer."""
    num_failed: int = 0
    """Requests for which v2 had no engine."""

    def ask(self, model: str = "chat", session: str = "") -> str:
        """Send a short request and return the version that answers it; "" if it has no engine."""
        body = {"model": model, "prompt": "def main", "max_tokens": 1, "prompt_cache_key": session}
        answer = httpx.post(f"{self.service.url}/v1/completions", json=body, timeout=PATIENCE_S)
        if answer.status_code == 503:
            self.num_failed += 1
            return ""
        self.versions.append(answer.raise_for_status().headers["x-raydix-version"])
        return self.versions[-1]

    def read(self, session: str, model: str = "chat", after: str = "", num_events: int | None = None) -> Part:
        """Read a stream to its end, or so many events of it; `after` is the id of an event to continue after."""
        body = {"model": model, "prompt": f"{session}: def", "max_tokens": 200, "ignore_eos": True, "seed": 7}
        body |= {"temperature": 1.0, "stream": True, "prompt_cache_key": session}
        headers = {"accept": "text/event-stream"} | ({"last-event-id": after} if after else {})
        url, lines, texts = f"{self.service.url}/v1/completions", EventLines(), list[str]()
        with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE_S) as response:
            assert response.status_code == 200, response.read()
            self.versions.append(version := response.headers["x-raydix-version"])
            for line in response.iter_lines():
                data = lines.take(line).get("data")
                if data == "[DONE]" or len(texts) == num_events:
                    return Part(version, "".join(texts), lines.last_id)
                if data is not None:
                    texts.append(json.loads(data)["choices"][0]["text"])
        raise AssertionError("the stream broke off")

    def rollout(self) -> dict[str, Any]:
        """Return the rollout's report."""
        url = f"{self.service.url}/v1/cluster/rollouts"
        (model,) = httpx.get(url, headers=ADMIN, timeout=60).raise_for_status().json()["data"]
        rollout: dict[str, Any] = model["rollout"]
        share = rollout["percent"] / 100
        assert model["weights"] == pytest.approx({"v1": 1 - share, "v2": share})
        return rollout

    def wait_for(self, state: str, percent: float) -> None:
        """Return when the rollout is in this state, with this share."""

        def is_there() -> bool:
            rollout = self.rollout()
            return (rollout["state"], rollout["percent"]) == (state, percent)

        wait_until(is_there, state=self.rollout)

    def wait_for_counts(self) -> None:
        """Return when the hub has counted all requests to v2 so far."""

        def counted() -> tuple[float, ...]:
            names = ("raydix_requests_total", "raydix_request_errors_total")
            return tuple(self.service.metric(name, model_name="chat@v2") for name in names)

        wait_until(lambda: counted() == (self.versions.count("v2"), self.num_failed), state=counted)

    def order(self, action: str) -> str:
        """Give an order on the command line, which the ingress obeys from then on; return the rollout's state."""
        self.wait_for_counts()
        done = raydix("rollout", action, "chat", "--url", self.service.url, "--key", KEY)
        assert done.returncode == 0, done.stderr
        (state,) = re.findall(r"rollout of v2: (\w+), step", done.stdout)
        return str(state)

    def begin(self) -> None:
        """Have the rollout begin again at its first step."""
        assert self.order("abort") == "aborted"
        self.order("resume")
        self.wait_for("running", STEPS[0])

    def sessions_of_v2(self) -> set[str]:
        """Return the sessions that v2 answers now. The step begins again after it."""
        assert self.order("pause") == "paused"
        found = {session for session in SESSIONS if self.ask(session=session) == "v2"}
        assert self.order("resume") == "running"
        return found

    def ask_enough(self) -> None:
        """Send v2 as many requests as a step needs."""
        for _ in range(ENOUGH):
            self.ask("chat@v2")


@pytest.fixture(scope="module")
def chat(service: Service) -> Iterator[Chat]:
    """The application, whose rollout has taken its first step. v2 has coarser weights, so its texts differ."""
    engine = {"model": "demo", "served_name": "chat", "kv_pages": 512, "threads": 1}
    engines = {"num_cpus": 0.1}
    rollout = {"steps": STEPS, "hold_s": 0.1, "min_requests": ENOUGH, "abort_on": {"error_rate": 0.1}}
    coarser = {**engine, "quantization": "int8"}
    arguments = {
        "models": [
            {"engine": engine, "engines": engines, "version": "v1"},
            {"engine": coarser, "engines": engines, "version": "v2", "rollout": rollout},
        ],
        "ingresses": {"num_cpus": 0.1},
        "streams": {"detached_s": 600, "keep_s": 600},
        "admin_key_hash": hashlib.sha256(KEY.encode()).hexdigest(),
    }

    def is_up(service: Service) -> bool:
        return Chat(service).rollout()["state"] == "running" and bool(service.health()["status"] == "healthy")

    with running("rollout", arguments, is_up, external_scaler_enabled=True) as started:
        yield Chat(started)


def test_the_new_version_gets_more_sessions_at_each_step_and_gives_none_back(chat: Chat) -> None:
    chat.begin()
    at_first = chat.sessions_of_v2()
    chat.ask_enough()
    chat.wait_for("running", STEPS[1])
    assert set() < at_first < chat.sessions_of_v2() < set(SESSIONS)
    for state in ("running", "done"):
        chat.ask_enough()
        chat.wait_for(state, STEPS[2])
    assert {chat.ask(session=session) for session in SESSIONS} == {"v2"}


def test_a_stream_ends_on_the_version_that_it_began_with(chat: Chat) -> None:
    """Clients ask again and again until their sessions have moved, and then continue a stream that was cut off
    before.
    """
    known = {
        (session, version): chat.read(session, f"chat@{version}").text
        for session in SESSIONS[:4]
        for version in ("v1", "v2")
    }
    assert len(set(known.values())) == len(known)
    chat.begin()
    sessions = sorted(set(SESSIONS[:4]) - chat.sessions_of_v2())
    cut = {session: chat.read(session, num_events=2) for session in sessions}
    assert {part.version for part in cut.values()} == {"v1"}
    whole: dict[str, list[Part]] = {session: [] for session in sessions}

    def read_until_moved(session: str) -> None:
        def has_moved() -> bool:
            whole[session].append(chat.read(session))
            return whole[session][-1].version == "v2"

        wait_until(has_moved)

    with ThreadPoolExecutor(len(sessions)) as pool:
        readers = [pool.submit(read_until_moved, session) for session in sessions]
        wait_until(lambda: all(whole.values()))
        for percent in STEPS[1:]:
            chat.ask_enough()
            chat.wait_for("running", percent)
        for reader in readers:
            reader.result()
    for session in sessions:
        assert whole[session][0].version == "v1"
        assert all(part.text == known[session, part.version] for part in whole[session])
        rest = chat.read(session, after=cut[session].last_id)
        assert (rest.version, cut[session].text + rest.text) == ("v1", known[session, "v1"])


def test_an_operator_pauses_resumes_and_aborts(chat: Chat) -> None:
    chat.begin()
    assert chat.order("pause") == "paused"
    for _ in range(2):  # the hub decides whenever it counts: with enough requests, and once more
        chat.ask_enough()
        chat.wait_for_counts()
    assert (chat.rollout()["state"], chat.rollout()["percent"]) == ("paused", STEPS[0])
    assert chat.order("resume") == "running"
    chat.ask_enough()
    chat.wait_for("running", STEPS[1])
    assert chat.order("abort") == "aborted"
    assert {chat.ask(session=session) for session in SESSIONS} == {"v1"}
    assert chat.ask("chat@v2") == "v2"
    shown = raydix("rollout", "list", "--url", chat.service.url, "--key", KEY).stdout
    assert shown.splitlines() == ["chat: v1 100 %, v2 0 %", "  rollout of v2: aborted, step 0 of 3"]
    refused = raydix("rollout", "pause", "chat", "--url", chat.service.url, "--key", KEY)
    assert refused.returncode == 1 and "Pause is not possible" in refused.stderr


def test_a_version_whose_requests_fail_is_rolled_back(chat: Chat) -> None:
    """It has no engine any more. Its sessions return to the other version."""
    chat.begin()
    session = min(chat.sessions_of_v2())
    url = f"{chat.service.url}/v1/models/chat@v2"
    httpx.delete(url, headers=ADMIN, timeout=60).raise_for_status()
    wait_until(lambda: chat.service.health()["models"]["chat@v2"]["status"] == "unloaded")
    assert {chat.ask(session=session) for _ in range(ENOUGH)} == {""}
    chat.wait_for("rolled_back", 0)
    assert chat.rollout()["reason"] == f"error_rate was 1, above 0.1, in {ENOUGH} requests at {STEPS[0]} %"
    wait_until(lambda: chat.ask(session=session) == "v1")
    labels = {"model": "chat", "version": "v2", "state": "rolled_back"}
    assert chat.service.metric("raydix_rollout_state", **labels) == 1
