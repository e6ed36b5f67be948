"""One ingress's API with everything in it that counts open requests, and a client that leaves at a chosen time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from typing import Any, Literal

import pytest

from deployments.admission.admission import Admission
from deployments.api import ApiService, Limits, ModelCard, ServedModel, TextCodec, create_app
from deployments.api.http.access import AccessControl
from deployments.api.http.body_memory import BodyMemory
from deployments.api.http.pacing import Pace
from deployments.api.http.transport import ON_DISCONNECT
from deployments.client.model_client import ModelClient
from deployments.client.protocol import Engines, GenerateRequest
from deployments.config.settings import AdmissionSettings
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from monitoring.metrics import Metrics
from tests.deployments.support.scripted_api import MAX_MODEL_LEN, MODEL, ScriptedEngine
from tests.support.metric_values import snapshot_of

KEY = "k" * 20
WAIT = 3
"""Checks of the engines' load for which a request waits, where it has to."""

Leaving = Literal["server", "asgi", "connection"]
"""Who ends the request: the server by a cancel; ASGI's message or the connection, which tell of the client."""

ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}),
    ("/v1/responses", {"input": "hi"}),
)
"""A request for each endpoint that generates."""


class Busy:
    """A `LoadView` of engines that have room at a later check."""

    has_engines = True

    def __init__(self, num_checks: int) -> None:
        self.num_checks = num_checks

    def given_way(self, tenants: Collection[str], num_sending: int) -> set[str]:
        return set()

    def queue_seconds(self, num_sending: int) -> float:
        self.num_checks -= 1
        return 0.0 if self.num_checks < 0 else 1000.0

    def num_idle(self) -> int:
        return 1000

    def uncached_tokens(self, request: GenerateRequest) -> int:
        return len(request.prompt_ids)


class WatchedApi:
    """One ingress's API, with everything in it that counts open requests."""

    def __init__(self, codec: TextCodec, monkeypatch: pytest.MonkeyPatch, engines: Engines | None = None) -> None:
        """Without `engines`, scripted ones answer."""
        self.paces: list[Pace] = []
        self.bodies: list[BodyMemory] = []
        monkeypatch.setattr("deployments.api.service.workroom.Pace", self._pace)
        monkeypatch.setattr("deployments.api.service.workroom.BodyMemory", self._memory)
        self.scripted = ScriptedEngine(codec, says="The quick brown fox", chunk=2)
        self.metrics = Metrics(MODEL, "i", "ingress")
        self.load = Busy(0)
        self.admission = Admission(self.load, AdmissionSettings(), {})
        self.access = AccessControl(
            KeyRing((TenantSettings(name="t", key_hashes=(hash_key(KEY),), max_concurrency=4),))
        )
        card = ModelCard(MODEL, created=1, max_model_len=MAX_MODEL_LEN, vocab_size=4096)
        served = ServedModel(card, ModelClient(engines or self.scripted, self.admission), codec, self.metrics)
        limits = Limits(max_chunks_per_s=100)
        self.app = create_app(
            ApiService({MODEL: served}, _no_metrics, limits, self.metrics, access=self.access, max_open=8)
        )

    def _pace(self, max_per_s: float | None) -> Pace:
        self.paces.append(Pace(max_per_s))
        return self.paces[-1]

    def _memory(self, max_bytes: int, *, has_tenants: bool) -> BodyMemory:
        self.bodies.append(BodyMemory(max_bytes, has_tenants=has_tenants))
        return self.bodies[-1]

    def left(self) -> dict[str, float]:
        """What is counted as open, or was not counted as ended."""
        values = snapshot_of(self.metrics).values

        def total(name: str) -> float:
            return sum(value for _, value in values[name])

        num_begun = sum(value for _, value in values.get("tenant_requests_total", []))  # none before the first

        # It is asked after each of a thousand requests, and does not look at those again that were closed.
        self.scripted.generations[:] = [each for each in self.scripted.generations if not each.closed]
        counts = {
            "generations": len(self.scripted.generations),
            "the tenant's generations": self.access.num_open().get("t", 0),
            "streams with a pace": sum(pace._num_open for pace in self.paces),
            "bytes of bodies": sum(memory.num_bytes for memory in self.bodies),
            "waiting requests": self.admission.num_waiting,
            "waiting tokens": self.admission.num_waiting_tokens,
            "requests being sent": len(self.admission._sending),
            "requests in flight": total("http_inflight_requests"),
            "accepted, not ended": num_begun - total("requests_total"),
        }
        return {name: count for name, count in counts.items() if count}


def left_running() -> dict[str, int]:
    """Count the event loop's tasks but this one, and its timers."""
    timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    counts = {
        "tasks": len(asyncio.all_tasks()) - 1,
        "timers": sum(not timer.cancelled() for timer in timers),
    }
    return {name: count for name, count in counts.items() if count}


class WatchedClient:
    """Sends one request to the application, and may leave."""

    def __init__(
        self, app: Callable[..., Any], path: str, body: dict[str, Any], leaving: Leaving = "asgi"
    ) -> None:
        self._leaving, self.has_left = leaving, asyncio.Event()
        self._unread = [{"type": "http.request", "body": json.dumps({"model": MODEL, **body}).encode()}]
        self._watches: list[Callable[[], None]] = []
        self.status: int | None = None
        self.sent = b""
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "client": ("c", 1), "server": ("s", 80), "headers": [(b"authorization", b"Bearer " + KEY.encode())],
        }  # fmt: skip
        if leaving == "connection":
            scope[ON_DISCONNECT] = self._watch
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def stop(self) -> None:
        """Let the server end the request."""
        self.task.cancel()

    def leave(self) -> None:
        """End the request."""
        if self._leaving == "server":
            self.stop()
        self.has_left.set()
        for leave in list(self._watches):
            leave()

    def _watch(self, leave: Callable[[], None]) -> Callable[[], None]:
        self._watches.append(leave)
        if self.has_left.is_set():
            asyncio.get_running_loop().call_soon(leave)
        return lambda: self._watches.remove(leave)

    async def _receive(self) -> dict[str, Any]:
        if self._unread:
            return self._unread.pop()
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await asyncio.sleep(0)  # a socket whose buffer is full
        self.status = message.get("status", self.status)
        self.sent += message.get("body", b"")


async def _no_metrics() -> tuple[bytes, str]:
    return b"", ""
