"""`raydix top` reads the real API with the admin key, with a wrong one, and without."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from typing import Any

import httpx
import pytest

from deployments.api import ApiService, create_app
from deployments.api.http.access import AccessControl
from deployments.cli.top_client import NO_ADMIN_KEY, NO_KEY, TopClient, TopClientError
from deployments.cli.top_state import ViewBuilder
from deployments.config.args import AppArgs
from deployments.config.tenants import KeyRing
from monitoring.hub import Hub
from monitoring.metrics import Metrics
from monitoring.page import CONTENT_TYPE
from tests.support.metric_values import snapshot_of

KEY = "the-admin-key-of-this-test"
KEY_HASH = hashlib.sha256(KEY.encode()).hexdigest()
TENANT = {"name": "team", "key_hashes": [hashlib.sha256(b"another-key").hexdigest()]}


class InProcess(httpx.BaseTransport):
    """An application without a server, for a client that is not asynchronous."""

    def __init__(self, service: ApiService) -> None:
        self.serve(service)

    def serve(self, service: ApiService) -> None:
        """Go on as another service."""
        self._app = create_app(service)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                answer = await client.request(request.method, str(request.url), headers=dict(request.headers))
                return httpx.Response(answer.status_code, content=answer.content)

        return asyncio.run(send())


class ScriptedCluster:
    async def status(self) -> dict[str, Any]:
        starting = {"replica": "replica-3", "state": "STARTING"}
        return {"versions": {}, "models": [{"id": "demo", "replicas": [starting]}]}

    async def nodes(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("demo", "ingress-1", "ingress")


@pytest.fixture
def closed(service: ApiService, metrics: Metrics) -> ApiService:
    """A service with a tenant, an admin key, and a real metrics page."""
    args = AppArgs.model_validate({"tenants": [TENANT], "admin_key_hash": KEY_HASH})
    hub = Hub()

    async def metrics_text() -> tuple[bytes, str]:
        hub.push("ingress", metrics.snapshot(), 0.0)
        return hub.render(0.0), CONTENT_TYPE

    return dataclasses.replace(
        service,
        metrics_text=metrics_text,
        access=AccessControl(KeyRing(args.tenants, args.admin_key_hash)),
        admin_key_hash=KEY_HASH,
        cluster=ScriptedCluster(),
    )


def source(service: ApiService, key: str | None = None) -> TopClient:
    return TopClient("http://test", key, InProcess(service))


def test_the_admin_key_opens_decisions_and_the_cluster(closed: ApiService) -> None:
    reading = source(closed, KEY).read()
    assert (reading.decisions, reading.hidden) == ([], {})
    view = ViewBuilder("http://test").see(reading)
    states = {replica.replica: replica.state for replica in view.replicas}
    assert states == {"replica-1": "up", "replica-2": "lost", "replica-3": "starting"}
    assert [model.model for model in view.models] == ["demo"]


def test_without_a_key_nothing_closed_is_asked_for(closed: ApiService, metrics: Metrics) -> None:
    reading = source(closed).read()
    assert reading.status is None and reading.decisions is None
    assert reading.hidden.keys() == {"cluster status", "router decisions"}
    assert reading.health["replicas_up"] == 1
    assert reading.page.total("admission_rejections_total", reason="unauthenticated") == 0


def test_an_open_server_shows_a_client_without_a_key_all_that_it_may_see(
    closed: ApiService, metrics: Metrics
) -> None:
    opened = dataclasses.replace(closed, access=AccessControl(), admin_key_hash=None)
    reading = source(opened).read()
    assert reading.status is not None and reading.status["models"]
    assert reading.hidden.keys() == {"router decisions"}
    assert "the server has none: set admin_key_hash" in reading.hidden["router decisions"]
    assert "--key" not in reading.hidden["router decisions"], "there is no key to give"
    refused = [count for labels, count in snapshot_of(metrics).values["http_requests_total"] if "403" in labels]
    assert refused == []


def test_the_screen_says_which_key_opens_a_hidden_view(closed: ApiService) -> None:
    """A tenant's key is enough for the cluster where no admin key is set; an admin key closes an open server's."""
    only_tenants = dataclasses.replace(closed, admin_key_hash=None)
    assert source(only_tenants).read().hidden["cluster status"] == NO_KEY
    only_admin = dataclasses.replace(closed, access=AccessControl(admin_key_hash=KEY_HASH))
    assert set(source(only_admin).read().hidden.values()) == {NO_ADMIN_KEY}


def test_keys_that_are_set_while_it_watches_hide_the_status(closed: ApiService) -> None:
    """And keys that are taken away open it."""
    server = InProcess(dataclasses.replace(closed, access=AccessControl(), admin_key_hash=None))
    client = TopClient("http://test", None, server)
    assert client.read().status is not None
    server.serve(closed)
    assert client.read().status is None
    server.serve(dataclasses.replace(closed, access=AccessControl(), admin_key_hash=None))
    assert client.read().status is not None


def test_a_page_that_no_key_opens_asks_for_none(closed: ApiService) -> None:
    access = AccessControl(KeyRing(()), protects_metrics=True)
    with pytest.raises(TopClientError, match="none is set: give admin_key_hash") as refused:
        source(dataclasses.replace(closed, access=access, admin_key_hash=None)).read()
    assert "--key" not in str(refused.value)


def test_a_wrong_key_is_reported(closed: ApiService) -> None:
    without_tenants = dataclasses.replace(closed, access=AccessControl())
    for service in (closed, without_tenants):
        with pytest.raises(TopClientError, match=r"cluster/status refuses this key: .*Check --key-env") as refused:
            source(service, "some-other-key").read()
        assert not refused.value.is_temporary


def test_a_protected_page_needs_the_key(closed: ApiService) -> None:
    access = AccessControl(KeyRing(()), protects_metrics=True, admin_key_hash=KEY_HASH)
    protected = dataclasses.replace(closed, access=access)
    with pytest.raises(TopClientError, match=r"/metrics is protected: .*Give --key-env or --key") as refused:
        source(protected).read()
    assert not refused.value.is_temporary
    with pytest.raises(TopClientError, match="Check --key-env or --key"):
        source(protected, "some-other-key").read()
    assert source(protected, KEY).read().decisions == []


def test_without_an_admin_key_the_reason_is_shown(closed: ApiService) -> None:
    opened = dataclasses.replace(closed, access=AccessControl(), admin_key_hash=None)
    reading = source(opened, KEY).read()
    assert "admin_key_hash" in reading.hidden["router decisions"]
    assert reading.status is not None
