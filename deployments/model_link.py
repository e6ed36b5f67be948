"""One model's engines as an ingress process reaches them: connections, router, admission, and what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from deployments.admission import AdmissionClient
from deployments.api.service import ModelCard, ServedModel
from deployments.api.text_codec import TextCodec
from deployments.attempt import ClientTimings
from deployments.cluster import ClusterModel
from deployments.config import AppArgs, ModelArgs
from deployments.delivery import Persistence
from deployments.engine_client import WireEngineClient
from deployments.handle_control import HandleControl
from deployments.model_switch import PUT_AWAY, DeploymentSwitch, SwitchedEngines
from deployments.observed_load import ObservedLoad
from deployments.serve_control import ServeControl
from deployments.settings import HealthSettings
from deployments.tenants import KeyRing
from deployments.warm_up import Post
from engine.config import EngineConfig
from engine.engine import model_directory
from engine.hub import fingerprint
from engine.models.config import ModelConfig
from engine.tokenizer import load_tokenizer
from monitoring.metrics import Metrics
from router.fleet import fleet_of
from router.placer import placer_of


class ModelLink:
    """This process's connections to one model's engines, and what it counts of the model's requests."""

    def __init__(self, args: AppArgs, model: ModelArgs, engines: Any, process: str, control: ServeControl) -> None:
        self.name = model.name
        self.metrics = Metrics(model.name, process, "ingress")
        self._model, self._engines = model, engines
        self._fleet = fleet_of(engines.app_name, engines.deployment_name)
        self._placer = placer_of(self._fleet, args.placer(model))
        self._warm_up, self._admission, self._num_ingresses = args.warm_up, args.admission, args.ingresses.count
        self._health, self._sync_timeout_s = args.health, args.router.sync_timeout_s
        self._switch = DeploymentSwitch(control, engines.deployment_name, model.num_when_loaded)
        self._client: WireEngineClient | None = None

    async def start(self) -> None:
        """Connect, on the event loop that will serve requests, and learn what the engines hold."""
        self._client = WireEngineClient(
            HandleControl(self._engines),
            self._fleet,
            self._model.engines.num_expected,
            ClientTimings(lost_after_s=self._health.lost_after_s),
            _persistence(self._health),
            self.metrics,
            fingerprint(await asyncio.to_thread(model_directory, self._model.engine)),
        )
        await self._client.start()
        # The handle's router, which fills the fleet, is made by the first call: do not leave that to a user's.
        if await self._switch.state() in PUT_AWAY:
            # A call that waits for a replica would be a reason for Serve to start one; a broadcast does not wait.
            self._first_call = asyncio.create_task(self._meet_nobody())
            return
        self._first_call = asyncio.create_task(self._meet_engines())
        # Requests that come before the engines' prefixes are known would be sent anywhere.
        await asyncio.wait([self._first_call], timeout=self._sync_timeout_s)

    def served(self, keys: KeyRing) -> ServedModel:
        """What the API needs of the model, for the tenants with these keys. Reads its files."""
        assert self._client is not None, "start() comes first"
        directory = model_directory(self._model.engine)
        card = _card(self._model.engine, ModelConfig.from_directory(directory))
        load = ObservedLoad(
            SwitchedEngines(self._client, self._switch), self._num_ingresses, self._placer.uncached_tokens
        )
        tenants = {tenant.name: tenant for tenant in keys.tenants}
        client = AdmissionClient(load, load, self._admission, tenants, self.metrics)
        return ServedModel(card, client, TextCodec(load_tokenizer(directory)), self.metrics, self._switch)

    def in_cluster(self) -> ClusterModel:
        """What the cluster's state needs of the model."""
        assert self._client is not None, "start() comes first"
        return ClusterModel(self.name, self._engines.deployment_name, self._client, self._describe)

    async def aclose(self) -> None:
        """Disconnect. Idempotent."""
        if self._client is not None:
            await self._client.aclose()

    def post(self) -> Post:
        """What `MetricsHub.post_prefixes` takes."""
        prefixes = self._placer.hot_prefixes(self._warm_up.max_tokens)
        return Post(self.name, self._model.engine.block_tokens, self._warm_up.half_life_s, prefixes)

    def snapshot(self) -> bytes:
        """What `MetricsHub.push` takes."""
        metrics, totals = self.metrics, self._placer.totals()
        for (policy, reason), count in self._placer.counts().items():
            metrics.count_to("router_decisions_total", count, policy=policy, reason=reason)
        metrics.count_to("router_errors_total", self._placer.num_errors)
        metrics.count_to("router_regret_tokens_total", totals["regret"])
        metrics.count_to("router_hit_tokens_total", totals["predicted"], kind="predicted")
        metrics.count_to("router_hit_tokens_total", totals["actual"], kind="actual")
        metrics.set("router_index_blocks", totals["blocks"])
        metrics.count_to("router_index_dropped_blocks_total", totals["dropped"])
        dropped = self._client.wire_counts() if self._client is not None else {}
        for kind, count in dropped.items():
            metrics.count_to("wire_dropped_messages_total", count, kind=kind)
        return metrics.snapshot()

    async def _describe(self) -> list[dict[str, Any]]:
        """What each replica says of itself; one that fails says nothing."""
        answers = await self._engines.broadcast("describe").results_async(return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _meet_nobody(self) -> None:
        with contextlib.suppress(Exception):
            await self._describe()

    async def _meet_engines(self) -> None:
        with contextlib.suppress(Exception):
            await self._engines.describe.remote()
            assert self._client is not None
            await self._client.know_prefixes(self._sync_timeout_s)


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
