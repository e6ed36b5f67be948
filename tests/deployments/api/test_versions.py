"""Versions of one model behind its name: which of them answers, stays, continues a stream, and is administered."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, ModelCard, ServedModel, TextCodec, create_app
from deployments.api.served.versions import Versions
from deployments.config.versions import VersionPlan
from monitoring.metrics import Metrics
from tests.deployments.api.streams.conftest import EVENTS, adoptable, events_of
from tests.deployments.support.scripted_api import Client, ScriptedEngine
from tests.deployments.support.scripted_switch import ScriptedSwitch
from tests.support.metric_values import count_of

KEY = "the key"
ADMIN = {"authorization": f"Bearer {KEY}"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ASK = {"model": "chat", "prompt": "a"}


@dataclass
class Service:
    """A model `chat` with two versions, and another model."""

    engines: dict[str, ScriptedEngine]
    switches: dict[str, ScriptedSwitch]
    versions: Versions
    service: ApiService
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = Client(httpx.ASGITransport(create_app(self.service)))

    def weigh(self, v1: float, v2: float) -> None:
        self.versions.weights = {"v1": v1, "v2": v2}


@pytest.fixture
def served(codec: TextCodec) -> Service:
    async def metrics_text() -> tuple[bytes, str]:
        return b"", "text/plain"

    engines = {name: ScriptedEngine(codec, says=f"I am {name}.") for name in ("chat@v1", "chat@v2", "other")}
    switches = {name: ScriptedSwitch() for name in engines}
    models = {}
    for name, engine in engines.items():
        model, _, version = name.partition("@")
        card = ModelCard(model, 1, max_model_len=512, vocab_size=4096)
        metrics, switch = Metrics(name, "i"), switches[name]
        models[name] = ServedModel(card, engine, codec, metrics, switch, version=version or None)
    versions = Versions(VersionPlan("chat", {"v1": 1.0, "v2": 1.0}))
    key_hash = hashlib.sha256(KEY.encode()).hexdigest()
    service = ApiService(models, metrics_text, versions={"chat": versions}, admin_key_hash=key_hash)
    return Service(engines, switches, versions, service)


def version_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-raydix-version"]


def test_the_answer_names_its_version_and_the_model_as_it_was_asked_for(served: Service) -> None:
    for at, (v1, v2) in enumerate([(1, 0), (0, 1)], 1):
        served.weigh(v1, v2)
        answer = served.client.post("/v1/completions", ASK)
        assert version_of(answer) == f"v{at}"
        assert (answer.json()["model"], answer.json()["choices"][0]["text"]) == ("chat", f"I am chat@v{at}.")
        metrics = served.service.models[f"chat@v{at}"].metrics
        labels = {"endpoint": "completions", "streaming": "false", "finish_reason": "stop"}
        assert metrics is not None and count_of(metrics, "requests_total", **labels) == 1
        assert served.engines[f"chat@v{at}"].requests[-1].model == f"chat@v{at}"
    assert "x-raydix-version" not in served.client.post("/v1/completions", ASK | {"model": "other"}).headers


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/completions", ASK, {"x-session-id": "SESSION"}),
        ("/v1/chat/completions", CHAT | {"model": "chat", "prompt_cache_key": "SESSION"}, {}),
        ("/tokenize", ASK, {"x-session-id": "SESSION"}),
    ],
)
def test_a_session_stays_on_its_version(
    served: Service, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    seen = set()
    for number in range(12):
        session = f"s{number}"
        own = dict.fromkeys(headers, session)
        named = {name: session if value == "SESSION" else value for name, value in body.items()}
        found = {version_of(served.client.post(path, named, headers=own)) for _ in range(3)}
        assert found == {served.versions.choose(f"anonymous\0{session}").partition("@")[2]}
        seen |= found
    assert seen == {"v1", "v2"}


def test_a_stored_conversation_stays_on_its_version(served: Service) -> None:
    conversations = [served.client.post("/v1/conversations", {}).json()["id"] for _ in range(8)]
    for given in (*conversations, *({"id": name} for name in conversations)):
        body = {"model": "chat", "input": "hi", "conversation": given}
        assert len({version_of(served.client.post("/v1/responses", body)) for _ in range(2)}) == 1


def test_responses_that_continue_each_other_stay_on_the_version_of_the_first(served: Service) -> None:
    for _ in range(8):
        found, body = [], {"model": "chat", "input": "hi"}
        for _ in range(4):
            answer = served.client.post("/v1/responses", body)
            found.append(version_of(answer))
            body = {"model": "chat", "input": "more", "previous_response_id": answer.json()["id"]}
        assert len(set(found)) == 1


def test_requests_without_a_session_are_divided(served: Service) -> None:
    counts = Counter(version_of(served.client.post("/v1/completions", ASK)) for _ in range(60))
    assert min(counts["v1"], counts["v2"]) > 10  # of 60, 11 of one are 5 standard deviations away


@pytest.mark.parametrize("is_posted", [True, False])
def test_a_stream_is_continued_by_the_version_that_has_it(served: Service, is_posted: bool) -> None:
    served.weigh(1, 0)
    for engine in served.engines.values():
        engine.keeps = True
    body = ASK | {"stream": True}
    whole = events_of(served.client.post("/v1/completions", body, headers=EVENTS).content)
    asked = served.engines["chat@v1"].requests[0].stream
    assert asked is not None
    name = adoptable(served.engines["chat@v1"], whole[2][0], record=asked.record)
    served.weigh(0, 1)
    headers = EVENTS | {"last-event-id": whole[2][0]}
    if is_posted:
        answer = served.client.post("/v1/completions", body, headers=headers)
    else:
        answer = served.client.get(f"/v1/streams/{name}", headers=headers)
    assert version_of(answer) == "v1"
    assert events_of(answer.content) == whole[3:]
    assert served.engines["chat@v1"].adopted and not served.engines["chat@v2"].requests


def test_a_stream_that_is_no_longer_kept_is_made_again_by_the_version_that_its_name_chooses(
    served: Service,
) -> None:
    body, found = ASK | {"stream": True}, set()
    for _ in range(12):
        first = served.client.post("/v1/completions", body, headers=EVENTS)
        whole = events_of(first.content)
        again = served.client.post("/v1/completions", body, headers=EVENTS | {"last-event-id": whole[2][0]})
        assert version_of(again) == version_of(first)
        assert events_of(again.content) == whole[3:]
        found.add(version_of(again))
    assert found == {"v1", "v2"}


def test_no_stream_is_continued_with_the_text_of_another_version(served: Service) -> None:
    served.weigh(1, 0)
    body = ASK | {"stream": True}
    whole = events_of(served.client.post("/v1/completions", body, headers=EVENTS).content)
    served.weigh(0, 1)
    refused = served.client.post("/v1/completions", body, headers=EVENTS | {"last-event-id": whole[-2][0]})
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "stream_differs"


def test_a_version_can_be_asked_for_before_it_has_sessions(served: Service) -> None:
    served.weigh(1, 0)
    answer = served.client.post("/v1/completions", ASK | {"model": "chat@v2"})
    assert version_of(answer) == "v2"


def test_versions_are_one_model_to_clients(served: Service) -> None:
    served.switches["chat@v1"].now = "loading"
    served.weigh(1, 3)
    listed = served.client.get("/v1/models").json()["data"]
    assert [(model["id"], model["state"]) for model in listed] == [("chat", "loaded"), ("other", "loaded")]
    assert served.client.get("/v1/models/chat").json() == listed[0]
    of_version = served.client.get("/v1/models/chat@v1").json()
    assert (of_version["id"], of_version["state"]) == ("chat@v1", "loading")
    unknown = served.client.post("/v1/completions", ASK | {"model": "huge"})
    assert unknown.status_code == 404 and "'chat', 'other'." in unknown.json()["error"]["message"]


def test_the_only_model_need_not_be_named(served: Service) -> None:
    models = {name: model for name, model in served.service.models.items() if name != "other"}
    client = Client(httpx.ASGITransport(create_app(replace(served.service, models=models))))
    assert version_of(client.post("/tokenize", {"prompt": "a"})) in ("v1", "v2")


def test_a_version_is_loaded_and_unloaded_by_its_own_name(served: Service) -> None:
    client = served.client
    for method, path in (("DELETE", "/v1/models/chat"), ("POST", "/v1/models/chat/load")):
        refused = client.request(method, path, headers=ADMIN)
        assert refused.status_code == 400 and "chat@v1, chat@v2" in refused.json()["error"]["message"]
    assert client.request("DELETE", "/v1/models/chat@v1", headers=ADMIN).json()["id"] == "chat@v1"
    assert client.post("/v1/models/chat@v2/load", headers=ADMIN).status_code == 202
    assert [served.switches[name].orders for name in served.switches] == [["unload"], ["load"], []]


def test_reports_about_a_model_are_about_all_its_versions(served: Service) -> None:
    emptied = served.client.post("/reset_prefix_cache?model=chat", headers=ADMIN).json()["data"]
    assert [each["id"] for each in emptied] == ["chat@v1", "chat@v2"]
    assert list(served.client.get("/health").json()["models"]) == ["chat@v1", "chat@v2", "other"]
    for version in ("v1", "v2"):
        served.client.post("/v1/completions", ASK | {"model": f"chat@{version}"})
    for name, number in (("chat", 2), ("chat@v1", 1), ("other", 0)):
        decisions = served.client.get(f"/v1/router/decisions?model={name}", headers=ADMIN)
        assert len(decisions.json()["data"]) == number
