"""One engine in one Serve replica: requests and tokens use the wire; Serve watches, scales and stops the replica.

    wire's thread    requests ─▶ Intake ─▶ engine
    engine thread    step, step, step ──▶ on_events ──▶ wire, metrics, calls of `generate`
    event loop       Serve's hooks, `watch`, `generate`

`check_health` checks that the engine's steps still finish, and succeed (`engine/program/self_test.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from deployments.client.outgoing import message_of
from deployments.client.protocol import CallOutcome, GenerateRequest
from deployments.config.live import check_live
from deployments.config.version import raydix_version
from deployments.control.orphan import end_with_raylet
from deployments.hub.calls import HubCalls
from deployments.replica.devices import gpu_utilization, gpus_of
from deployments.replica.intake import Intake, Refusal
from deployments.replica.kv_events import KvEventPublisher
from deployments.replica.kv_fetch.exchange import KVExchange, check_transport
from deployments.replica.liveness import Beat, EngineUnhealthy, prove_step
from deployments.replica.load import DrainRate, LoadReporter, WorkMeter
from deployments.replica.metrics import EngineMetrics
from deployments.replica.notices import NoticeWatcher
from deployments.replica.ranks import load_engine
from deployments.replica.settings import ReplicaSettings
from deployments.replica.warm_up import share_prefixes, warm_up
from deployments.telemetry.garbage import GarbagePauses
from deployments.telemetry.live_level import LiveLevel, Reconfigured
from deployments.telemetry.metrics_push import MetricsPusher
from deployments.telemetry.serve_logging import log_through_serve
from deployments.wire.server import WireServer
from engine.base.machine import (
    prepare_process,
    shared_threads,
    usable_cores,
    use_cpu_policy,
    was_started_with,
)
from engine.program.engine import Engine
from engine.scheduling.stats import StepStats
from engine.settings.config import EngineConfig
from engine.values.stream_delta import STEP_FAILED, StreamDelta
from monitoring.metrics import Metrics
from router.addresses import store_name
from router.ray_internals import keep_calls_on_this_machine, serve_is_stopping, target_replicas

logger = logging.getLogger("ray.serve")

_SWITCH_S = 0.001
"""Seconds after which a thread of this process hands over the interpreter to one that waits for it. A thread that
launches a step's kernels would otherwise wait 5 ms at a time for the one that takes in requests."""
_WATCH_POLL_S = 0.2
"""Seconds between two checks whether a replica that is being stopped has streams of an ingress left."""

EngineFactory = Callable[[EngineConfig], Engine]


def serve_whereabouts() -> tuple[str, str]:
    """Return this Serve replica's id and its node's address."""
    import ray  # only here, so that the rest works without Ray
    from ray import serve

    return serve.get_replica_context().replica_id.unique_id, ray.util.get_node_ip_address()


def _with_threads(config: EngineConfig, settings: ReplicaSettings) -> EngineConfig:
    """Set the number of threads if neither the config nor the environment nor Ray's CPUs determine it."""
    if config.threads is not None or settings.num_sharing is None or was_started_with("OMP_NUM_THREADS"):
        return config
    prepare_process(config.cpus)
    num_sharing = _num_ranks_now(settings.ranks) or settings.num_sharing
    return replace(config, threads=shared_threads(num_sharing, usable_cores()))


def _num_ranks_now(ranks: Mapping[str, int]) -> int:
    """Return Serve's target number of engine ranks, which may have changed; 0 if it is unknown."""
    if not ranks:
        return 0
    from ray import serve

    targets = target_replicas(serve.get_replica_context().app_name)
    return sum(targets.get(name, 0) * size for name, size in ranks.items())


class EngineReplica:
    """The class that Serve runs: one engine, its end of the wire, and its metrics.

    Its parts are set once, in the constructor; those without an underscore may be read from any thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        settings: ReplicaSettings,
        hub: Any = None,
        engine_factory: EngineFactory = load_engine,
        whereabouts: Callable[[], tuple[str, str]] = serve_whereabouts,
        is_stopping: Callable[[], bool] = serve_is_stopping,
    ) -> None:
        log_through_serve()
        end_with_raylet()
        keep_calls_on_this_machine()
        self._level, self._reconfigured = LiveLevel(), Reconfigured(partial(check_live, live=()))
        use_cpu_policy(settings.cpu_policy)
        sys.setswitchinterval(_SWITCH_S)
        self.replica, host = whereabouts()
        self._settings, self._is_stopping = settings, is_stopping
        self.kv_events: KvEventPublisher | None = None
        if settings.kv_events is not None:  # before the model is loaded, to report bad endpoints early
            self.kv_events = KvEventPublisher(settings.kv_events, self.replica, host, config.name)
        check_transport(settings.kv_fetch)  # also before
        self.engine = engine_factory(_with_threads(config, settings))
        if self.kv_events is not None and settings.kv_events is not None:
            followed = self.engine.cache.follow_blocks(settings.kv_events.include_tenants)
            self.engine.runner.lower_tier.log.events = followed
            self.kv_events.start(followed)
        self.engine.loop.self_test.max_failed_steps = settings.health.max_failed_steps
        shared = share_prefixes(
            self.engine, settings.shared_prefixes, settings.chat, settings.warm_up.max_kv_share
        )
        self.exchange = KVExchange.of(self.engine, host, settings.kv_fetch, settings.wire)
        if settings.role is not None and self.engine.cache.resume_points is not None:
            raise ValueError(
                f"engines.roles makes replicas fetch KV from each other, but {config.name} needs more than KV "
                "to resume (recurrent states, windows): remove roles, or set engine.windowed_kv to off if "
                "it has no recurrent layers"
            )
        self._calls: dict[str, _Call] = {}
        self._drain = DrainRate()
        self.notices = NoticeWatcher(settings.drain, self.replica)
        is_leaving = lambda: self.notices.is_leaving or is_stopping()  # noqa: E731
        self.intake = Intake(self.engine, self._drain, is_leaving)
        self._work = WorkMeter(config.page_tokens, config.max_running, time.monotonic())
        metrics = Metrics(config.name, self.replica, "engine")
        self._metrics = EngineMetrics(metrics)
        self._metrics.describe(**_build_info(self.engine))
        self._metrics.on_warm_up(shared)
        self._reporter = LoadReporter(
            self.engine.loop.load,
            self.engine.loop.clock,
            config.max_running,
            config.max_waiting,
            lambda: self._drain.finish_rate,
            is_leaving,
            partial(_load_rates, self.engine),
            self._fetch_rate,
            lambda: self.engine.loop.failing,
            lambda: self.notices.seconds_left,
        )
        self.wire = WireServer(
            host,
            self.replica,
            self._reporter.read,
            self.intake,
            replace(
                settings.timings,
                heartbeat_s=settings.health.heartbeat_s,
                idle_heartbeat_s=min(settings.timings.idle_heartbeat_s, settings.health.lost_after_s / 5),
            ),
            self.engine.cache.prefix_log,
            config.block_tokens,
            getattr(self.engine.runner, "fingerprint", ""),
            settings.wire,
            self.engine.runner.lower_tier.log,
            settings.streams,
        )
        self.intake.wire = self.wire
        self.wire.start()
        self.notices.start()
        self._beat = Beat(settings.health.beat_directory, self.replica)
        self._garbage = GarbagePauses()
        self._hub = hub
        self._pusher: MetricsPusher | None = None
        if hub is not None:
            self._pusher = MetricsPusher(
                HubCalls(hub, lambda: not self.engine.loop.has_work),
                self.replica,
                lambda: self._snapshot(metrics),
                mirror_to_ray=settings.metrics.ray,
                on_level=self._level.set,
            )
        if hub is None:
            self.engine.loop.start(self._on_events, self._on_step, self._on_failure)

    # --- Serve's hooks -------------------------------------------------------------------------------------

    async def record_replica_metadata(self) -> dict[str, str]:
        """Warm up, then return the wire's address and keys, which Ray carries to the ingresses' routers.

        Serve calls this once, after the constructor, and sends no request before it has returned. Warm-up is done
        here because the constructor cannot await the hub.
        """
        if self._pusher is not None:
            await asyncio.to_thread(prove_step, self.engine)
            self._metrics.on_warm_up(await warm_up(self.engine, self._hub, self._settings.warm_up))
            self._garbage.settle()
            self.engine.loop.start(self._on_events, self._on_step, self._on_failure)
            self._pusher.start()
        return {
            "wire_endpoint": self.wire.endpoint,
            "wire_secret": self.wire.secret,
            "wire_public_key": self.wire.public_key,
            "wire_epoch": str(self.wire.epoch),
            **({} if self.exchange is None else self.exchange.sender.address.metadata()),
            **self._role,
            **({"store": store_name(store)} if (store := self.engine.runner.lower_tier.store) else {}),
        }

    async def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        """Refuse all settings: a running engine applies none, see `deployments/config/live.py`."""
        self._reconfigured(user_config)

    async def check_health(self) -> None:
        """Raise EngineUnhealthy if the loop has ended, for example after failed steps, or finishes no step."""
        if self.engine.loop.failure is not None:
            raise EngineUnhealthy(self.engine.loop.failure)
        silence = self.engine.loop.clock() - self.engine.loop.last_progress
        if self.engine.loop.has_work and silence > self._settings.health.stall_timeout_s:
            raise EngineUnhealthy(f"no engine step has finished for {silence:.0f} s although there is work")
        self._beat.mark()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report this replica's work to `deployments.replica.autoscaling.WorkPolicy`."""
        return self._work.read(self.engine.loop.load(), self.wire.backlog(), time.monotonic())

    async def describe(self) -> dict[str, Any]:
        """Describe this replica: its longest context in tokens, and its GPUs."""
        device = str(getattr(self.engine.runner, "device", "none"))
        gpus = await asyncio.to_thread(gpus_of, device)
        longest = self.engine.max_model_len
        return {"replica": self.replica, "max_model_len": longest, "gpus": gpus, **self._role}

    @property
    def _role(self) -> dict[str, str]:
        """Return the advertised role of this replica, if it has one."""
        return {} if self._settings.role is None else {"role": self._settings.role}

    def close(self) -> None:
        """Stop the engine and the wire. Idempotent."""
        if self.kv_events is not None:
            self.kv_events.close()
        if self._pusher is not None:
            self._pusher.stop()
        self.notices.close()
        self._garbage.close()
        self._beat.clear()
        self.intake.close()
        self.engine.close()
        if self.exchange is not None:  # after the engine, whose thread wakes it
            self.exchange.close()
        self.wire.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor failed half-way
            self.close()

    # --- calls through Serve -------------------------------------------------------------------------------

    async def watch(self, target: Any, ingress_id: str) -> None:
        """Stay open while both live: the end of the call shows the ingress that this process is gone.

        `target` names this replica, for the router. When Serve is stopping this replica, the call returns as soon
        as the ingress has no streams left here and no replica fetches KV, because Serve waits for the call.
        """
        while not (self._is_stopping() and self._may_end(ingress_id)):
            await asyncio.sleep(_WATCH_POLL_S)

    def _may_end(self, ingress_id: str) -> bool:
        is_done_lending = self.exchange is None or self.exchange.may_end()
        return is_done_lending and not self.wire.has_streams_of(ingress_id)

    async def empty_cache(self) -> tuple[str, int]:
        """Drop all cached prefixes that no request uses. Return this replica's id and the number of pages freed.

        Routers learn of it as of any other change of the cache. Raises EngineStopped.
        """
        return self.replica, await asyncio.wrap_future(self.engine.loop.empty_cache())

    async def generate(self, request: GenerateRequest) -> CallOutcome:
        """Run a request of a program that holds a handle, and return its whole output, or why it was refused.

        Cancelling the call aborts the request. Raises EngineUnhealthy when the engine cannot continue.
        """
        if request.request_id in self._calls:
            return self._refused(Refusal("never_fits", f"request id {request.request_id!r} is already in use"))
        call = self._calls[request.request_id] = _Call(request.request_id)
        try:
            refusal = await self._submit(request)
            if refusal is not None:
                return self._refused(refusal)
            return CallOutcome(self.replica, await call.ended)
        except asyncio.CancelledError:
            self.engine.loop.abort(request.request_id)
            raise
        finally:
            del self._calls[request.request_id]

    async def _submit(self, request: GenerateRequest) -> Refusal | None:
        grammar = request.sampling.grammar
        compiled = None if grammar is None else await asyncio.to_thread(self.intake.compile, grammar)
        if isinstance(compiled, Refusal):
            return compiled
        made = self.intake.make(message_of(request, 0), compiled)
        return made if isinstance(made, Refusal) else self.intake.submit(made)

    def _refused(self, refusal: Refusal) -> CallOutcome:
        return CallOutcome(self.replica, None, refusal.kind, refusal.reason, refusal.retry_after_s)

    # --- the engine's thread -------------------------------------------------------------------------------

    def _on_events(self, events: list[StreamDelta]) -> None:
        self.wire.publish(events)
        self._metrics.on_events(events)
        for event in events:
            is_ours = event.error_code in (None, STEP_FAILED)  # otherwise it is the client's
            if event.finish_reason == "error" and is_ours:
                logger.error("%s failed: %s", event.request_id, event.error)
            if self._calls and (call := self._calls.get(event.request_id)) is not None:
                call.feed(event)

    def _on_step(self, stats: StepStats) -> None:
        self._metrics.on_step(stats)
        self._reporter.on_step(stats)
        self._work.on_step(stats)
        self._drain.observe(time.monotonic(), stats.num_prefill_tokens, self.engine.loop.load().num_finished)

    def _fetch_rate(self) -> float:
        return 0.0 if self.exchange is None else self.exchange.fetcher.tokens_per_s

    def _on_failure(self, reason: str) -> None:
        """Fail all requests together, so that their streams resume elsewhere before this replica is replaced."""
        self.wire.fail_all(reason)
        for call in list(self._calls.values()):
            call.fail(EngineUnhealthy(reason))

    def _snapshot(self, metrics: Metrics) -> bytes:
        self._garbage.report(metrics)
        metrics.set("refuses_settings", float(self._reconfigured.is_refused))
        self._metrics.on_load(self.engine.loop.load())
        self._metrics.on_failed_steps(self.engine.loop.self_test.counts)
        self._metrics.on_grammars(self.engine.grammars)
        if self.exchange is not None:
            self._metrics.on_lent(self.exchange.sender.counts["pages"], self.exchange.page_bytes)
        self._metrics.on_evicted(self.engine.cache.page_ages.drain())
        if self.kv_events is not None:
            self._metrics.on_kv_events(self.kv_events.counts.copy())
        self._metrics.on_notices(self.notices.counts.copy())
        metrics.set("engine_up", float(self.engine.loop.failure is None))
        utilization = gpu_utilization(str(getattr(self.engine.runner, "device", "none")))
        if utilization is not None:
            metrics.set("gpu_utilization_ratio", utilization)
        self._metrics.on_expert_load(getattr(self.engine.runner, "expert_load", None))
        metrics.set("wire_kept_requests", self.wire.num_kept)
        metrics.set("detached_requests", self.wire.num_detached)
        metrics.set("detached_bytes", self.wire.detached_bytes)
        metrics.set("wire_ingresses", self.wire.num_ingresses)
        for kind, count in self.wire.counts.copy().items():
            metrics.count_to("wire_rejected_messages_total", count, kind=kind)
        return metrics.snapshot()


class _Call:
    """One call of `generate`, made on its event loop; other threads call `feed` and `fail`."""

    def __init__(self, request_id: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[StreamDelta] = self._loop.create_future()
        """Done with the whole output at its end."""
        self._output = StreamDelta(request_id)

    def feed(self, delta: StreamDelta) -> None:
        """Add new output of the request."""
        self._output.add(delta)
        if delta.finish_reason is not None:
            self._resolve(lambda: self.ended.set_result(self._output))

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        self._resolve(lambda: self.ended.set_exception(error))

    def _resolve(self, resolve: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so no call waits
            self._loop.call_soon_threadsafe(lambda: None if self.ended.done() else resolve())


def _load_rates(engine: Engine) -> tuple[float, ...]:
    """Return the tokens/s that host memory, and files, give back, if there are any."""
    seconds = (engine.runner.host_memory.page_seconds, engine.runner.lower_tier.page_seconds)
    return tuple(engine.config.page_tokens / each for each in takewhile(bool, seconds))


def _build_info(engine: Engine) -> dict[str, Any]:
    runner = engine.runner
    return {
        "version": raydix_version(),
        "attention": str(getattr(runner, "attention_name", "none")),
        "device": str(getattr(runner, "device", "none")),
        "dtype": str(getattr(runner, "dtype", "none")).removeprefix("torch."),
        "page_size": engine.config.page_size,
    }
