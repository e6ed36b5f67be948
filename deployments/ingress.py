"""The ingress deployment: the OpenAI API on one side, the engines on the other. CPU only, any number of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from deployments.api.app import create_app
from deployments.api.service import ApiService, ModelCard
from deployments.api.text_codec import TextCodec
from deployments.attempt import ClientTimings, ReplicaDied
from deployments.client import GenerateRequest
from deployments.config import AppArgs, HealthSettings
from deployments.delivery import Persistence
from deployments.engine_client import WireEngineClient
from deployments.metrics_hub import MetricsPusher, read_page
from engine.config import EngineConfig
from engine.engine import model_directory
from engine.hub import fingerprint
from engine.models.config import ModelConfig
from engine.tokenizer import load_tokenizer
from monitoring.metrics import Metrics
from router.fleet import fleet_of
from router.placer import placer_of


class HandleControl:
    """`Control` over a Serve handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def generate(self, request: GenerateRequest, ingress_id: str, avoid: tuple[str, ...]) -> HandleCall:
        """Call the replica that the router picks."""
        return HandleCall(self._handle.generate.remote(request, ingress_id, avoid))


class HandleCall:
    """`ControlCall` over a `DeploymentResponse`."""

    def __init__(self, response: Any) -> None:
        self._response = response

    async def result(self) -> dict[str, Any]:
        """Wait for the record."""
        try:
            record: dict[str, Any] = await self._response
        except BackPressureError as error:
            return {"refused": "queue_full", "reason": str(error), "retry_after_s": 1.0}
        except ActorDiedError:
            raise ReplicaDied("its process died") from None
        return record

    def cancel(self) -> None:
        """Cancel the call in the replica too."""
        with contextlib.suppress(Exception):
            self._response.cancel()


@serve.ingress()
class Ingress:
    """Builds the API around this process's connections to the engines."""

    def __init__(self, args: AppArgs, engines: Any, hub: Any) -> None:
        self._args, self._engines, self._hub = args, engines, hub
        name = serve.get_replica_context().replica_id.unique_id
        self._metrics = Metrics(args.engine.name, name, "ingress")
        self._fleet = fleet_of(engines.app_name, engines.deployment_name)
        self._placer = placer_of(self._fleet, args.placer)
        self._pusher = MetricsPusher(hub, name, self._snapshot)

    async def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve once in the replica, on the event loop that will serve requests."""
        health = self._args.health
        self._client = WireEngineClient(
            HandleControl(self._engines),
            self._fleet,
            self._args.engines.num_expected,
            ClientTimings(lost_after_s=health.lost_after_s),
            _persistence(health),
            self._metrics,
            fingerprint(await asyncio.to_thread(model_directory, self._args.engine)),
        )
        await self._client.start()
        # The handle's router, which fills the fleet, is made by the first call: do not leave that to a user's.
        self._first_call = asyncio.create_task(self._meet_engines())
        # Requests that come before the engines' prefixes are known would be sent anywhere.
        await asyncio.wait([self._first_call], timeout=self._args.router.sync_timeout_s)
        self._pusher.start()
        return create_app(await asyncio.to_thread(self._service))

    async def _meet_engines(self) -> None:
        with contextlib.suppress(Exception):
            await self._engines.describe.remote()
            await self._client.know_prefixes(self._args.router.sync_timeout_s)

    def _service(self) -> ApiService:
        config = self._args.engine
        directory = model_directory(config)
        model = ModelConfig.from_directory(directory)
        return ApiService(
            client=self._client,
            codec=TextCodec(load_tokenizer(directory)),
            model=_card(config, model),
            metrics_text=lambda: read_page(self._hub),
            limits=self._args.limits,
            metrics=self._metrics,
        )

    def _snapshot(self) -> bytes:
        metrics, totals = self._metrics, self._placer.totals()
        for (policy, reason), count in self._placer.counts().items():
            metrics.count_to("router_decisions_total", count, policy=policy, reason=reason)
        metrics.count_to("router_errors_total", self._placer.num_errors)
        metrics.count_to("router_regret_tokens_total", totals["regret"])
        metrics.count_to("router_hit_tokens_total", totals["predicted"], kind="predicted")
        metrics.count_to("router_hit_tokens_total", totals["actual"], kind="actual")
        metrics.set("router_index_blocks", totals["blocks"])
        metrics.count_to("router_index_dropped_blocks_total", totals["dropped"])
        for kind, count in self._client.wire_counts().items():
            metrics.count_to("wire_dropped_messages_total", count, kind=kind)
        return self._metrics.snapshot()

    async def __del__(self) -> None:
        self._pusher.stop()
        if hasattr(self, "_client"):
            await self._client.aclose()


def _persistence(health: HealthSettings) -> Persistence:
    return Persistence(
        health.max_retries,
        health.max_migrations,
        health.migration_wait_s,
        health.hedge_after_s,
        health.hedge_share,
    )


def _card(config: EngineConfig, model: ModelConfig) -> ModelCard:
    return ModelCard(
        id=config.name,
        created=int(time.time()),
        max_model_len=min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings),
        vocab_size=model.vocab_size,
    )
