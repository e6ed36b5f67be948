"""An ingress's link to one model's engines: connections, router, admission and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cache import SharedPrefixes
from deployments.admission.admission import Admission
from deployments.admission.fleet_load import FleetLoad
from deployments.api.served.served_model import ModelCard, ServedModel
from deployments.api.served.shared_prefixes import shared_prefix_ids
from deployments.api.served.text_codec import TextCodec
from deployments.client.model_client import ModelClient
from deployments.client.protocol import UNLOADED_STATES
from deployments.client.remote_engines import RemoteEngines
from deployments.client.serve_watcher import ServeWatcher
from deployments.config.args import AppArgs
from deployments.config.tenants import KeyRing
from deployments.config.version import raydix_version
from deployments.control.cluster import ClusterModel
from deployments.control.controller_client import ControllerClient
from deployments.control.model_switch import DeploymentSwitch
from deployments.hub.warm_up_board import PrefixReport
from deployments.ingress.cache_reset import empty_caches
from deployments.ingress.engine_handles import EngineHandles
from deployments.ingress.grammar_check import GrammarCheck
from deployments.ingress.metrics import IngressMetrics
from deployments.wire.deadlines.time_limit import timeout
from engine.grammar.vocabulary import Vocabulary
from engine.model_config.any_model import model_facts
from engine.model_config.config import ModelConfig
from engine.model_config.encoder import EncoderConfig
from engine.model_config.tasks import Task, tasks_of
from engine.model_files.model_directory import fingerprint
from engine.program.engine import model_directory
from engine.settings.config import EngineConfig
from engine.settings.generation_defaults import generation_defaults
from engine.text.tokenizer import Tokenizer, load_tokenizer
from monitoring.metrics import Metrics
from router.state import router_state

_WATCH_S = 5.0
"""Seconds between two questions to Serve how many replicas a model is to have."""
_ABSENT_S = 1.0
"""The same while there are none: requests wait for them, unless the model is unloaded."""


class ModelLink:
    """Connects this process to one model's engines, and counts the model's requests."""

    def __init__(
        self, args: AppArgs, fleet: str, engines: Mapping[str, Any], process: str, control: ControllerClient
    ) -> None:
        """`fleet` is the model's key in `args.served`; `engines` has Serve's handles by deployment."""
        self._model = model = args.served[fleet]
        self.name = model.label
        self.metrics = Metrics(model.label, process, "ingress")
        self._pools = pools = model.deployments(fleet)
        self._fleet_name = fleet
        self._router = router_state(engines[next(iter(pools))].app_name, fleet, args.placer(model))
        self._engines = EngineHandles(engines, pools, self._router.fleet)
        self._warm_up = args.warm_up
        self._health, self._sync_timeout_s = args.health, args.router.sync_timeout_s
        self._switch = DeploymentSwitch(control, self._engines.counts)
        self._args = args
        self._admission: Admission | None = None
        self._grammars: GrammarCheck | None = None
        self._connections: RemoteEngines | None = None
        self._tokenizer: Tokenizer | None = None
        self._codec: TextCodec | None = None
        self._declared, self._shared = args.shared_prefixes, SharedPrefixes()
        self._routing_metrics = IngressMetrics(self.metrics, self._router.placer, self._router.fleet)
        self._watch: asyncio.Task[None] | None = None
        self._is_unloaded = not model.load_at_start

    async def start(self) -> None:
        """Connect, on the event loop that will serve requests, and receive the engines' cache contents.

        Loads the tokenizer meanwhile. Raises ValueError when there is none, ModelLoadError when there is no model.
        """
        directory = await asyncio.to_thread(model_directory, self._model.engine)
        loading = asyncio.to_thread(load_tokenizer, directory)
        self._tokenizer = tokenizer = (await asyncio.gather(loading, self._connect(directory)))[0]
        cache_bytes = self._args.limits.token_cache_bytes
        codec = await asyncio.to_thread(TextCodec, tokenizer, self._model.chat, cache_bytes)
        self._codec = codec
        if self._declared:
            engine = self._model.engine
            shared = await asyncio.to_thread(shared_prefix_ids, codec, self._declared)
            self._shared = SharedPrefixes(engine.page_size, engine.block_tokens, shared)
            self._router.placer.share(self._shared)

    async def _connect(self, directory: Path) -> None:
        engine = self._model.engine
        self._fingerprint = await asyncio.to_thread(fingerprint, directory, engine.quantization, engine.kv_dtype)
        self._connections = RemoteEngines(
            self._router,
            self._model.engines.num_expected,
            ServeWatcher(self._engines.of),
            self._health,
            metrics=self.metrics,
            model=self._fingerprint,
        )
        await self._connections.start()
        self._watch = asyncio.create_task(self._watch_switch())
        # The first call creates the handle's router, which fills the fleet. No user's request should wait.
        if await self._switch.state() in UNLOADED_STATES:
            # A call that waits for a replica would make Serve start one; a broadcast does not wait.
            self._first_call = asyncio.create_task(self._start_router())
            return
        self._first_call = asyncio.create_task(self._learn_prefixes())
        # Requests that arrive before the engines' prefixes are known would miss their caches.
        with contextlib.suppress(TimeoutError), timeout(self._sync_timeout_s):
            await asyncio.wait([self._first_call])

    def served(self, keys: KeyRing) -> ServedModel:
        """Return the model as the API serves it to the tenants with these keys. Reads the model's files."""
        assert self._connections and self._tokenizer and self._codec, "start() comes first"
        tokenizer = self._tokenizer
        directory = model_directory(self._model.engine)
        config = model_facts(directory)
        defaults = generation_defaults(self._model.engine.generation_config, directory)
        tasks = tasks_of(self._model.engine.tasks, directory)
        card = _card(self._model.engine, config, self._fingerprint, defaults, tasks)
        connections, placer = self._connections, self._router.placer
        load = FleetLoad(self._router.fleet, placer.uncached_tokens, lambda: connections.expects_engines)
        is_apart = self._router.placer.is_apart
        self._admission = admission = Admission(load, self._args.admission, keys.by_name, self.metrics, is_apart)
        self._connections.report_backlog(admission.backlog)
        client = ModelClient(self._connections, admission, self._switch)
        self._grammars = GrammarCheck(
            lambda: Vocabulary.of(tokenizer, card.vocab_size, config.eos_token_ids),
            self._args.limits,
            self.metrics,
            keys.weights or None,
        )
        return ServedModel(
            card,
            client,
            self._codec,
            self.metrics,
            self._switch,
            self._grammars,
            self._empty_caches,
            self._shared,
            self._model.version,
        )

    def take_over(self, args: AppArgs, keys: KeyRing) -> None:
        """Use the settings that a running process can take over, and the tenants, for requests from now on."""
        assert self._admission and self._grammars, "served() comes first"
        self._router.placer.take_over(args.placer(self._model))
        self._admission.take_over(args.admission, keys.by_name)
        self._grammars.take_over(args.limits, keys.weights or None)

    def in_cluster(self) -> ClusterModel:
        """Return the model as the cluster's state reports it."""
        assert self._connections is not None, "start() comes first"
        deployments = tuple(self._engines.counts)
        return ClusterModel(self.name, self._fleet_name, deployments, self._connections, self._describe)

    @property
    def num_streams(self) -> int:
        """Number of requests that have not ended."""
        return 0 if self._connections is None else self._connections.num_streams

    async def lacks_engines(self) -> bool:
        """Return whether no engine answers although the model is not unloaded."""
        assert self._connections is not None, "start() comes first"
        is_served = (await self._connections.health()).num_up > 0
        return not is_served and await self._switch.state() not in UNLOADED_STATES

    async def aclose(self) -> None:
        """Disconnect. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
        if self._grammars is not None:
            self._grammars.close()
        if self._connections is not None:
            await self._connections.aclose()

    def prefix_report(self) -> PrefixReport:
        """Return the report for `MetricsHub.report_prefixes`."""
        prefixes = self._router.placer.hot_prefixes(self._warm_up.max_tokens)
        return PrefixReport(self.name, self._model.engine.block_tokens, self._warm_up.half_life_s, prefixes)

    def snapshot(self) -> bytes:
        """Return the metrics for `MetricsHub.push`."""
        num_expected = 0 if self._is_unloaded or self._connections is None else self._connections.num_expected
        self._routing_metrics.collect(self._connections, num_expected)
        return self.metrics.snapshot()

    async def _describe(self) -> list[dict[str, Any]]:
        """Return the descriptions of all replicas that answer."""
        answers = await self._engines.ask_all("describe")
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _empty_caches(self) -> dict[str, int]:
        """Empty the caches of all replicas; return the pages that each one freed. Raises Unavailable."""
        ask = partial(self._engines.ask_all, "empty_cache")
        timeout_s = self._health.status_timeout_s
        return await empty_caches(self.name, self._router.fleet.names, ask, self._switch.state, timeout_s)

    async def _watch_switch(self) -> None:
        """Track the number of replicas that Serve is to run, which may change at any time, and whether it is
        zero."""
        assert self._connections is not None
        while True:
            targets = await self._switch.targets()
            if targets is not None:
                self._is_unloaded = not any(targets.values())
                self._connections.num_expected = sum(
                    targets[name] if pool.scaling is None else pool.least for name, pool in self._pools.items()
                )
            if self._is_unloaded:
                self._connections.expect_none()
            waited = 0.0
            while waited < (_WATCH_S if self._router.fleet.names() else _ABSENT_S):
                await asyncio.sleep(_ABSENT_S)
                waited += _ABSENT_S

    async def _start_router(self) -> None:
        with contextlib.suppress(Exception):
            await self._describe()

    async def _learn_prefixes(self) -> None:
        with contextlib.suppress(Exception):
            await self._engines.start_routers()
            assert self._connections is not None
            await self._connections.wait_for_prefixes(self._sync_timeout_s)


def _card(
    config: EngineConfig,
    model: ModelConfig | EncoderConfig,
    files: str,
    defaults: dict[str, int | float],
    tasks: tuple[Task, ...],
) -> ModelCard:
    """`files` is the fingerprint of the model's files."""
    return ModelCard(
        id=config.name,
        created=int(time.time()),
        max_model_len=min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings),
        vocab_size=model.vocab_size,
        fingerprint=f"fp_{hashlib.blake2b(f'{files};{raydix_version()}'.encode(), digest_size=5).hexdigest()}",
        eos_token_ids=model.eos_token_ids,
        tasks=tasks,
        hidden_size=model.hidden_size,
        is_encoder=isinstance(model, EncoderConfig),
        sampling_defaults=defaults,
    )
