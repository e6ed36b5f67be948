"""The API over the client, the wire and real engine loops in one process, for behaviour that takes all of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

import deployments.demo_model
from cache import SharedPrefixes
from deployments.admission.admission import Admission
from deployments.api import ApiService, ModelCard, ServedModel, TextCodec, create_app
from deployments.api.http.access import AccessControl
from deployments.api.record.request_record import Listener, RequestRecord
from deployments.client.model_client import ModelClient
from deployments.client.protocol import GenerateRequest
from deployments.client.remote_engines import RemoteEngines
from deployments.config.settings import AdmissionSettings
from deployments.config.tenants import KeyRing, TenantSettings, hash_key
from engine.model_config.tasks import TASKS
from engine.text.tokenizer import load_tokenizer
from tests.deployments.support.in_process_engines import ClientAndEngines, InProcessEngines

PROMPT = list(range(100, 120))
ADMIN_KEY = "the-admins-key"


class Idle:
    """A `LoadView` of engines that always have room."""

    has_engines = True

    def given_way(self, tenants: Collection[str], num_sending: int) -> set[str]:
        return set()

    def queue_seconds(self, num_sending: int) -> float:
        return 0.0

    def num_idle(self) -> int:
        return 1000

    def uncached_tokens(self, request: GenerateRequest) -> int:
        return len(request.prompt_ids)


class Api:
    """Sends a test's requests, and collects the reports about them."""

    def __init__(
        self,
        client: RemoteEngines,
        engines: InProcessEngines,
        listeners: tuple[Listener, ...],
        tenants: Sequence[TenantSettings] = (),
        shared: Sequence[Sequence[int]] = (),
        files: Path | None = None,
    ) -> None:
        codec = TextCodec(load_tokenizer(files or Path(deployments.demo_model.__file__).parent))
        engine = engines.replicas[0].engine
        card = ModelCard(
            "m",
            1,
            max_model_len=engine.max_model_len if engine.is_encoder else 512,
            vocab_size=engine.model.vocab_size,
            tasks=tuple(task for task in TASKS if task in engine.tasks),
            hidden_size=getattr(engine.model, "hidden_size", 2),
            is_encoder=engine.is_encoder,
        )
        self.client, self.engines, self.codec = client, engines, codec
        self.reports: list[RequestRecord] = []
        waiting = ModelClient(client, Admission(Idle(), AdmissionSettings(), {}))
        self.service = service = ApiService(
            {
                "m": ServedModel(
                    card, waiting, codec, empty_caches=engines.empty_caches, shared=SharedPrefixes(4, 16, shared)
                )
            },
            no_metrics,
            listeners=(self.reports.append, *listeners),
            access=AccessControl(KeyRing(tenants, hash_key(ADMIN_KEY) if tenants else None)),
            admin_key_hash=hash_key(ADMIN_KEY) if tenants else None,
        )
        self.app = create_app(service)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")

    async def complete(self, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        """Request a completion of `PROMPT`, which no cache holds at first."""
        asked = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "include_timings": True, **body}
        return await self.http.post("/v1/completions", json=asked, headers=headers or {})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Parse a stream's events; asserts that it ends with [DONE]."""
    lines = [line[6:] for line in response.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@asynccontextmanager
async def api_over(
    count: int = 1,
    *listeners: Listener,
    tenants: Sequence[TenantSettings] = (),
    shared: Sequence[Sequence[int]] = (),
    health: Mapping[str, float] | None = None,
    files: Path | None = None,
    **config: Any,
) -> AsyncIterator[Api]:
    """Run the API over `count` engines; with `tenants`, `ADMIN_KEY` is the admin's. `shared` are prefixes. `files`
    is the directory of the tokenizer; None: the embedded model's.
    """
    async with ClientAndEngines(count, health=health, shared=shared, **config) as (client, engines):
        api = Api(client, engines, listeners, tenants, shared, files)
        async with api.http:
            yield api


async def no_metrics() -> tuple[bytes, str]:
    """An empty /metrics page."""
    return b"", "text/plain"
