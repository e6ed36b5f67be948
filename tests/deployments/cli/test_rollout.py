"""`raydix rollout` against the API's endpoints: what it shows, orders, and what is wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, create_app
from deployments.client.protocol import RolloutAction, RolloutRefused
from tests.deployments.support.all_routes import ROLLOUT
from tests.deployments.support.command_line import raydix
from tests.deployments.support.scripted_api import Client

SHOWN = """\
demo: v1 90 %, v2 10 %
  rollout of v2: running, step 1 of 2, held 4 of 60 s, 30 requests
  error_rate: 0 (at most 0.05)
  ttft_p95: 0.4 (no limit)
  tpot_p95: - (no limit)
"""


class Scripted:
    """A hub with one model, whose rollout obeys no second order."""

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = [
            {"model": "demo", "weights": {"v1": 0.9, "v2": 0.1}, "rollout": ROLLOUT | {"held_s": 4.0}}
        ]
        self.orders: list[tuple[str, str]] = []

    async def report(self) -> list[dict[str, Any]]:
        return self.models

    async def control(self, model: str, action: RolloutAction) -> dict[str, Any] | None:
        if self.orders:
            raise RolloutRefused(f"{action} is not possible: the rollout of version v2 is done")
        self.orders.append((model, action))
        return self.models[0]


@pytest.fixture
def hub(service: ApiService, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Has the command reach the API with this hub."""
    hub, key_hash = Scripted(), hashlib.sha256(b"root").hexdigest()
    client = Client(httpx.ASGITransport(create_app(replace(service, rollouts=hub, admin_key_hash=key_hash))))

    def request(method: str, url: str, **options: Any) -> httpx.Response:
        assert url.startswith("http://server:8000/v1/cluster/rollouts")
        return client.request(method, url, headers=options["headers"])

    monkeypatch.setattr(httpx, "request", request)
    monkeypatch.setenv("RAYDIX_ADMIN_KEY", "root")
    return hub


AT = ("--url", "http://server:8000/v1")


def test_versions_and_rollouts_are_shown(hub: Scripted) -> None:
    assert raydix("rollout", "list", *AT).stdout == SHOWN
    assert json.loads(raydix("rollout", "list", "--json", *AT).stdout)["data"] == hub.models
    hub.models[0]["rollout"] = {
        **ROLLOUT, "state": "rolled_back", "step": 0, "held_s": None, "num_requests": None, "measured": None,
        "reason": "error_rate was 0.5, above 0.05",
    }  # fmt: skip
    hub.models.append({"model": "plain", "weights": {"a": 1.0}, "rollout": None})
    assert raydix("rollout", "list", *AT).stdout.splitlines() == [
        "demo: v1 90 %, v2 10 %",
        "  rollout of v2: rolled_back, step 0 of 2",
        "  error_rate was 0.5, above 0.05",
        "plain: a 100 %",
    ]
    hub.models.clear()
    assert raydix("rollout", "list", *AT).stdout == "No model has versions.\n"


@pytest.mark.parametrize("action", ["pause", "resume", "abort"])
def test_orders_are_given_and_the_state_after_them_is_shown(hub: Scripted, action: str) -> None:
    assert raydix("rollout", action, "demo", *AT).stdout == SHOWN
    assert hub.orders == [("demo", action)]
    again = raydix("rollout", action, "demo", *AT)
    assert again.returncode == 1 and "is not possible: the rollout of version v2 is done" in again.stderr


def test_what_is_wrong_is_one_line(hub: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = raydix("rollout", "abort", "huge", *AT)
    assert unknown.returncode == 1 and "'huge' does not exist here" in unknown.stderr
    assert "This is not the admin key" in raydix("rollout", "list", "--key", "x", *AT).stderr
    monkeypatch.delenv("RAYDIX_ADMIN_KEY")
    assert "needs the admin key" in raydix("rollout", "list", *AT).stderr
    other = {"data": [{"model": "demo", "weights": {}, "rollout": {"steps": 3}}]}
    for answer, complaint in (
        (httpx.Response(502, text="bad gateway"), "HTTP 502"),
        (httpx.Response(200, json=other), "answer cannot be read"),
    ):
        said: Callable[..., httpx.Response] = lambda *_, answer=answer, **__: answer  # noqa: E731
        monkeypatch.setattr(httpx, "request", said)
        ended = raydix("rollout", "list", *AT)
        assert ended.returncode == 1 and complaint in ended.stderr


def test_a_server_that_is_not_there_is_named() -> None:
    ended = raydix("rollout", "list", "--url", "http://127.0.0.1:9")
    assert ended.returncode == 1 and "cannot reach http://127.0.0.1:9" in ended.stderr
