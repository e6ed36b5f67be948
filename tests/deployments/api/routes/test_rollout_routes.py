"""The endpoints of rollouts: reports, orders, and what is answered where an order is not possible."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, create_app
from deployments.client.protocol import RolloutAction, RolloutRefused, Unavailable
from tests.deployments.support.scripted_api import Client

ADMIN = {"authorization": "Bearer root"}
REPORT = {"model": "demo", "weights": {"v1": 1.0}, "rollout": None}
PATH = "/v1/cluster/rollouts"


@dataclass
class Scripted:
    """A hub that obeys, or fails."""

    fails_with: Exception | None = None
    answer: dict[str, Any] | None = field(default_factory=lambda: REPORT)
    orders: list[tuple[str, str]] = field(default_factory=list)

    async def report(self) -> list[dict[str, Any]]:
        if self.fails_with is not None:
            raise self.fails_with
        return [REPORT]

    async def control(self, model: str, action: RolloutAction) -> dict[str, Any] | None:
        self.orders.append((model, action))
        if self.fails_with is not None:
            raise self.fails_with
        return self.answer


@pytest.fixture
def rollouts() -> Scripted:
    return Scripted()


def client_of(service: ApiService, rollouts: Scripted, key: bytes | None = b"root") -> Client:
    key_hash = None if key is None else hashlib.sha256(key).hexdigest()
    models = {**service.models, "org/chat": service.models["demo"]}
    models["org/chat"] = replace(models["demo"], card=replace(models["demo"].card, id="org/chat"))
    changed = replace(service, models=models, rollouts=rollouts, admin_key_hash=key_hash)
    return Client(httpx.ASGITransport(create_app(changed)))


def test_they_are_listed_for_the_admin_where_there_is_one(service: ApiService, rollouts: Scripted) -> None:
    listed = {"object": "list", "data": [REPORT]}
    assert client_of(service, rollouts).get(PATH, headers=ADMIN).json() == listed
    assert client_of(service, rollouts).get(PATH).status_code == 401
    assert client_of(service, rollouts, key=None).get(PATH).json() == listed


@pytest.mark.parametrize("action", ["pause", "resume", "abort"])
@pytest.mark.parametrize("model", ["demo", "org/chat"])
def test_orders_reach_the_hub_and_are_answered_with_its_report(
    service: ApiService, rollouts: Scripted, model: str, action: str
) -> None:
    client = client_of(service, rollouts)
    assert client.post(f"{PATH}/{model}/{action}").status_code == 401
    assert client.post(f"{PATH}/{model}/{action}", headers={"authorization": "Bearer x"}).status_code == 403
    assert rollouts.orders == []
    answer = client.post(f"{PATH}/{model}/{action}", headers=ADMIN)
    assert (answer.status_code, answer.json(), rollouts.orders) == (200, REPORT, [(model, action)])
    assert client_of(service, rollouts, key=None).post(f"{PATH}/{model}/{action}").status_code == 403


def test_what_is_not_possible_says_why(service: ApiService, rollouts: Scripted) -> None:
    client = client_of(service, rollouts)
    unknown = client.post(f"{PATH}/huge/abort", headers=ADMIN)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert rollouts.orders == []
    rollouts.answer = None
    without = client.post(f"{PATH}/demo/abort", headers=ADMIN)
    assert (without.status_code, without.json()["error"]["code"]) == (404, "no_rollout")
    rollouts.fails_with = RolloutRefused("pause is not possible: the rollout of version v2 is done")
    refused = client.post(f"{PATH}/demo/pause", headers=ADMIN)
    assert refused.status_code == 409
    assert refused.json()["error"]["message"] == "Pause is not possible: the rollout of version v2 is done."
    rollouts.fails_with = Unavailable("the metrics hub does not answer")
    for answer in (client.post(f"{PATH}/demo/pause", headers=ADMIN), client.get(PATH, headers=ADMIN)):
        assert answer.status_code == 503 and "the metrics hub does not answer" in answer.text
    assert client.post(f"{PATH}/demo/stop", headers=ADMIN).status_code == 404
