"""The ingress deployment: the OpenAI API on one side, the engines on the other. CPU only, any number of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from deployments.admission import AdmissionClient
from deployments.api.access import Access
from deployments.api.app import create_app
from deployments.api.service import ApiService, ModelCard, ServedModel
from deployments.api.text_codec import TextCodec
from deployments.attempt import ClientTimings, ReplicaDied
from deployments.client import GenerateRequest
from deployments.cluster import Cluster, ClusterModel
from deployments.config import AppArgs, HealthSettings, ModelArgs
from deployments.delivery import Persistence
from deployments.engine_client import WireEngineClient
from deployments.metrics_hub import MetricsPusher, read_page
from deployments.model_switch import PUT_AWAY, DeploymentSwitch, SwitchedEngines
from deployments.observed_load import ObservedLoad
from deployments.serve_control import ServeControl
from deployments.tenants import KeyRing
from deployments.warm_up import Post, WarmUpPoster
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


@serve.ingress()
class Ingress:
    """Builds the API around this process's connections to the engines."""

    def __init__(self, args: AppArgs, engines: dict[str, Any], hub: Any) -> None:
        """`engines` are handles by model name."""
        self._args, self._hub = args, hub
        context = serve.get_replica_context()
        name = context.replica_id.unique_id
        self._control = control = ServeControl(context.app_name, args.health.status_timeout_s)
        self._links = [
            ModelLink(args, model, engines[model.name], name, control) for model in args.served.values()
        ]
        snapshots = {f"{name}/{link.name}": link.snapshot for link in self._links}
        # A request that names no model served here counts for the only one, or for none where there are several.
        self._metrics = self._links[0].metrics
        if len(self._links) > 1:
            self._metrics = Metrics("", name, "ingress")
            snapshots[name] = self._metrics.snapshot
        self._poster = WarmUpPoster(
            hub, name, lambda: [link.post() for link in self._links], args.warm_up.tell_period_s
        )
        self._pushers = [MetricsPusher(hub, process, snapshot) for process, snapshot in snapshots.items()]

    async def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve once in the replica, on the event loop that will serve requests."""
        await asyncio.gather(*(link.start() for link in self._links))
        for pusher in self._pushers:
            pusher.start()
        self._poster.start()
        return create_app(await asyncio.to_thread(self._service))

    def _service(self) -> ApiService:
        args, keys = self._args, KeyRing(self._args.tenants, self._args.admin_key_hash)
        models = [link.served(keys) for link in self._links]
        return ApiService(
            models={served.card.id: served for served in models},
            metrics_text=lambda: read_page(self._hub),
            limits=args.limits,
            access=Access(
                keys,
                args.ingresses.count,
                metrics_key_hash=args.admin_key_hash if args.protect_metrics else None,
            ),
            metrics=self._metrics,
            admin_key_hash=self._args.admin_key_hash,
            cluster=self._cluster(),
        )

    def _cluster(self) -> Cluster:
        return Cluster(
            [link.in_cluster() for link in self._links],
            self._control.view,
            ray.nodes,
            ray.available_resources,
            {"ray": ray.__version__},
            self._args.health.status_timeout_s,
        )

    async def __del__(self) -> None:
        self._poster.stop()
        for pusher in self._pushers:
            pusher.stop()
        for link in self._links:
            await link.aclose()


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
