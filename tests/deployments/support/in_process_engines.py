"""Engine replicas and a client in one process, without Ray. Only the models and the policy are replaced."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from deployments.client.attempt import ClientTimings
from deployments.client.protocol import GenerateRequest
from deployments.client.remote_engines import RemoteEngines
from deployments.client.replica_watch import Watcher
from deployments.config.kv_fetch import KvFetchSettings
from deployments.config.settings import DrainSettings, HealthSettings, StreamSettings
from deployments.replica.deployment import EngineReplica
from deployments.replica.settings import ReplicaSettings
from deployments.wire.server import WireTimings
from engine.host_tier.host_pool import HostMemory
from engine.host_tier.lower_tier import NoLowerTier
from engine.program.engine import Engine, LoadedRunner
from engine.settings.config import EngineConfig
from engine.values.logprobs import PackedLogprobs, TokenLogprobs
from engine.values.plan import Chunk, Step, StepPlan, StepResult
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from monitoring.metrics import Metrics
from router.addresses import KVAddress, ReplicaAddress
from router.fetch.roles import Role
from router.fleet import Fleet
from router.placer import Placeable, Placer
from router.state import RouterState
from tests.deployments.support.lossy_link import LossyLinks, lose

TIMINGS = ClientTimings(accept_s=60, tick_s=0.03)
SILENCE = {"lost_after_s": 1.5}
"""How soon tests of silence notice it. In others it never is: a busy machine keeps replicas silent, too."""
WIRE = WireTimings(heartbeat_s=0.03, idle_heartbeat_s=0.03, keep_ended_s=2, absent_ingress_s=0.6)


class Model:
    """The configuration of a model without weights."""

    vocab_size = 1000
    max_position_embeddings = 4096
    eos_token_ids: frozenset[int] = frozenset()


class CountingRunner:
    """Samples k + 1 as token k of each output. Steps take `step_s` at least, and wait while `gate` is clear unless
    they sample one of an output's first `free_tokens`.
    """

    attention_name = device = dtype = "none"
    fingerprint = ""
    host_memory = HostMemory()
    lower_tier = NoLowerTier()
    num_state_slots = 0
    is_encoder = False
    layer_groups = None
    page_memory = None

    def __init__(self, num_pages: int) -> None:
        self.model_config = Model()
        self.num_pages = num_pages
        self.gate = threading.Event()
        self.gate.set()
        self.free_tokens = 0
        self.step_s = 0.0

    def prepare(self, plan: StepPlan) -> Step:
        chunks = plan.sampling_chunks
        tokens = [chunk.start + chunk.num_tokens - chunk.request.num_prompt + 1 for chunk in chunks]

        logprobs = [logprobs_of(token, chunk.request) for token, chunk in zip(tokens, chunks, strict=True)]
        scores = {chunk.request.request_id: part for chunk in plan.chunks if (part := scores_of(chunk))}
        pooled = {chunk.request.request_id: values_at(chunk) for chunk in plan.pooled}

        def step() -> StepResult:
            if self.step_s:
                threading.Event().wait(self.step_s)
            if max(tokens, default=1) > self.free_tokens:
                self.gate.wait()
            return StepResult(tokens, logprobs, prompt_logprobs=scores, pooled=pooled)

        return step


def logprobs_of(token: int, asking: Request) -> TokenLogprobs | None:
    """Log-probabilities of a generated token if asked for, or of the candidates of a beam search.

    They are eighths, which every number format represents exactly.
    """
    if (beams := asking.sampling.beams) is not None:
        best = [(token + rank, -(rank + token % 3 + 1) / 8) for rank in range(beams.num_candidates(0))]
        return TokenLogprobs(*best[0], top=tuple(best))
    count = asking.sampling.logprobs
    return None if count is None else TokenLogprobs(token, -token / 8, ((token, -token / 8), (0, -9.0))[:count])


def values_at(chunk: Chunk) -> bytes:
    """What is wanted of a prompt: its length and its last token."""
    return struct.pack("<2f", chunk.start + chunk.num_tokens, chunk.token_ids[-1])


def scores_of(chunk: Chunk) -> PackedLogprobs | None:
    """Scores of the prompt tokens that a chunk predicts, if asked for: token p has -p / 8 and rank p."""
    asking = chunk.request
    first = max(chunk.start + 1, asking.num_prompt_reported)
    end = min(chunk.start + chunk.num_tokens + 1, asking.num_prompt)
    if asking.sampling.prompt_logprobs is None or first >= end:
        return None
    return PackedLogprobs(first, 0, b"".join(struct.pack("<fI", -at / 8, at) for at in range(first, end)))


class InProcessEngines:
    """Several replicas, between which `choose` chooses in place of a policy."""

    def __init__(
        self,
        count: int,
        wire: WireTimings = WIRE,
        load: Callable[[EngineConfig], LoadedRunner] | None = None,
        shared: Sequence[Sequence[int]] = (),
        kv_fetch: KvFetchSettings | None = None,
        roles: Sequence[Role] = (),
        streams: StreamSettings | None = None,
        drain: Callable[[str], DrainSettings] = lambda _: DrainSettings(),
        **config: Any,
    ) -> None:
        """`load` makes real runners for them; `shared` are prefixes that they compute for all salts; `kv_fetch`
        says how they fetch KV from each other, if they have the memory for it; `roles`, what each one does, if not
        all; `streams`, how long resumable streams are kept; `drain`, where each finds notices of its end.
        """
        health = HealthSettings(stall_timeout_s=0.5, heartbeat_s=wire.heartbeat_s)
        kept = streams or StreamSettings()
        settings = ReplicaSettings(health=health, timings=wire, kv_fetch=kv_fetch, streams=kept)
        at_once = {"stream_interval_ms": 0.0}  # tests hold steps back, but none of the tokens before
        engine_config = EngineConfig(**{"served_name": "m", "kv_pages": 64, "page_size": 4, **at_once, **config})
        self.stopping: set[str] = set()
        """Replicas that Serve has asked to shut down."""
        self.runners = [CountingRunner(engine_config.kv_pages or 64) for _ in range(0 if load else count)]
        loaded: Sequence[LoadedRunner] = [load(engine_config) for _ in range(count)] if load else self.runners
        self.replicas = [
            EngineReplica(
                engine_config,
                replace(settings, role=roles[number] if roles else None, drain=drain(f"r{number}")),
                None,
                _engine_with(runner, shared),
                _located(f"r{number}"),
                partial(self.stopping.__contains__, f"r{number}"),
            )
            for number, runner in enumerate(loaded)
        ]
        self.fleet = Fleet()
        self.links = LossyLinks()
        """The links of ingresses to the replicas."""
        self.calls: list[str] = []
        """The replicas to which requests were sent, in order."""
        self.choose: Callable[[Sequence[str]], str] = lambda names: names[0]

    async def advertise(self) -> None:
        """Tell the fleet the replicas' addresses, as Serve's controller does."""
        addresses = {}
        for replica in self.replicas:
            metadata = await replica.record_replica_metadata()
            addresses[replica.replica] = ReplicaAddress(
                replica.replica,
                metadata["wire_endpoint"],
                metadata["wire_secret"],
                int(metadata["wire_epoch"]),
                metadata["wire_public_key"],
                KVAddress.advertised(metadata),
                metadata.get("role", ""),
            )
        self.fleet.update(addresses)

    def fall_silent(self, number: int) -> None:
        """Have nothing that a replica sends arrive, as if its machine hung, until it speaks again."""
        self.links[f"r{number}"].to_ingress = lose

    def speak(self, number: int) -> None:
        """Have arrive again what a replica sends."""
        self.links[f"r{number}"].to_ingress = None

    async def empty_caches(self) -> dict[str, int]:
        """Call all replicas, as an ingress does through Serve."""
        return dict(await asyncio.gather(*(replica.empty_cache() for replica in self.replicas)))

    def close(self) -> None:
        for runner in self.runners:
            runner.gate.set()
        for replica in self.replicas:
            replica.close()


class ChosenPlacer(Placer):
    """Places each request at the replica that `engines.choose` says, and notes it in `engines.calls`."""

    def __init__(self, engines: InProcessEngines) -> None:
        super().__init__(engines.fleet)
        self._engines = engines

    def order(self, request: Placeable, candidates: Collection[str], avoid: Collection[str] = ()) -> Sequence[str]:
        names = sorted(candidates)
        if not names:
            return []
        name = self._engines.choose([n for n in names if n not in avoid] or names)
        self._engines.calls.append(name)
        self._engines.fleet.book(request.request_id, name)
        return [name]


class WeighingPlacer(ChosenPlacer):
    """Lets the router weigh the replica that `engines.choose` says, as if it were the only one."""

    def order(self, request: Placeable, candidates: Collection[str], avoid: Collection[str] = ()) -> Sequence[str]:
        return Placer.order(self, request, super().order(request, candidates, avoid))


def _engine_with(runner: LoadedRunner, shared: Sequence[Sequence[int]]) -> Callable[[EngineConfig], Engine]:
    def make(config: EngineConfig) -> Engine:
        engine = Engine(config, runner)
        engine.share_prefixes(shared)
        return engine

    return make


def _located(name: str) -> Callable[[], tuple[str, str]]:
    return lambda: (name, "127.0.0.1")


class ClientAndEngines:
    """A client connected to its engines: `async with ClientAndEngines(2) as (client, engines)`."""

    def __init__(
        self,
        count: int = 1,
        timings: ClientTimings = TIMINGS,
        health: Mapping[str, Any] | None = None,
        metrics: Metrics | None = None,
        watcher: Watcher | None = None,
        placer: Callable[[InProcessEngines], Placer] = ChosenPlacer,
        **config: Any,
    ) -> None:
        self._watcher, self._placer = watcher, placer
        self._count, self._timings, self._config, self._metrics = count, timings, config, metrics
        self._health = HealthSettings(**{"lost_after_s": 60.0, **(health or {})})

    async def __aenter__(self) -> tuple[RemoteEngines, InProcessEngines]:
        self._engines = InProcessEngines(self._count, **self._config)
        self._client = RemoteEngines(
            RouterState(self._engines.fleet, self._placer(self._engines)),
            self._count,
            self._watcher,
            self._health,
            self._timings,
            self._metrics,
            open_link=self._engines.links.open,
        )
        await self._client.start()
        await self._engines.advertise()
        return self._client, self._engines

    async def __aexit__(self, *_: object) -> None:
        for runner in self._engines.runners:
            runner.gate.set()
        await self._client.aclose()
        await asyncio.to_thread(self._engines.close)


@asynccontextmanager
async def another(engines: InProcessEngines) -> AsyncIterator[RemoteEngines]:
    """Another ingress that is connected to the same engines."""
    client = RemoteEngines(router_like(engines), 1, timings=TIMINGS, open_link=engines.links.open)
    await client.start()
    await until(lambda: len(client.reachable()) == len(engines.replicas))
    try:
        yield client
    finally:
        await client.aclose()


def request(request_id: str, max_tokens: int = 5, prompt_len: int = 8, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return GenerateRequest(request_id, "m", list(range(prompt_len)), sampling, **fields)


async def until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)


def is_nothing_left(client: RemoteEngines, engines: InProcessEngines) -> bool:
    """Whether neither the client nor an engine holds anything of any request."""
    accounts = [replica.engine.scheduler.account() for replica in engines.replicas]
    return not (
        client.num_streams
        or client._dispatch.attempts
        or client.fleet.num_open
        or client.placer._open
        or any(engines.fleet.loads().values())
        or any(account.locked + account.private for account in accounts)
        or any(replica.engine.loop.has_work or replica.wire.num_live for replica in engines.replicas)
    )


def router_like(engines: InProcessEngines, epoch_shift: int = 0) -> RouterState:
    """Return a client of the same replicas in another ingress."""
    fleet = Fleet()
    fleet.update(
        {
            name: replace(address, epoch=(address.epoch or 0) + epoch_shift)
            for name, address in engines.fleet.addresses().items()
        }
    )
    return RouterState(fleet, Placer(fleet))
