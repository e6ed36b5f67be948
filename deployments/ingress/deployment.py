"""The ingress deployment: the OpenAI API over the engines. It needs only CPUs, and any number of them may run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve

from deployments.api.application.live_api import LiveApi
from deployments.api.http.access import AccessControl
from deployments.api.record.request_record import Listener
from deployments.api.responses.kept import KeptResponses
from deployments.api.served.versions import Versions
from deployments.api.service.api_service import ApiService
from deployments.batch.batch_worker import BatchWorker
from deployments.batch.prompts import Answer, Prompt
from deployments.batch.spool import Spool
from deployments.config.args import AppArgs
from deployments.config.live import with_live
from deployments.config.shown import shown_settings
from deployments.config.tenants import KeyRing
from deployments.control.cluster import Cluster
from deployments.control.controller_client import ControllerClient
from deployments.control.orphan import end_with_raylet
from deployments.hub.calls import HubCalls
from deployments.hub.keeper import MetricsKeeper
from deployments.ingress.access_file import with_access_file
from deployments.ingress.batches import batch_worker
from deployments.ingress.http_server import HttpServer, check_proxy
from deployments.ingress.many import ManyPrompts
from deployments.ingress.model_link import ModelLink
from deployments.ingress.opening import until_useful
from deployments.ingress.prefix_reporter import PrefixReporter
from deployments.ingress.roll_call import RollCall
from deployments.ingress.rollouts import RolloutFollower
from deployments.telemetry.garbage import OFTEN, GarbagePauses
from deployments.telemetry.line_file import LineFile
from deployments.telemetry.live_level import LiveLevel
from deployments.telemetry.loop_lag import LoopLag
from deployments.telemetry.metrics_push import MetricsPusher
from deployments.telemetry.request_log import RequestLog
from deployments.telemetry.serve_logging import log_through_serve
from deployments.telemetry.tracing import open_tracing
from deployments.wire.open_files import allow_open_files
from engine.base.machine import return_memory, use_cpu_policy
from monitoring.metrics import Metrics
from router.ray_internals import keep_calls_on_this_machine, request_namer, serve_is_stopping

logger = logging.getLogger("ray.serve")


def directly_served(service: ApiService, max_open: int) -> ApiService:
    """Return the service for clients that connect without a proxy: it does the work of Serve's proxy and
    replica."""
    return replace(
        service,
        is_named_outside=False,
        max_open=max_open,
        on_named=request_namer(),
    )


def _line_file(args: AppArgs) -> LineFile | None:
    return None if args.logging.access_log is None else LineFile(args.logging.access_log)


@serve.ingress()
class Ingress:
    """Builds the API over this process's connections to the engines."""

    def __init__(self, args: AppArgs, engines: dict[str, Any], hub: Any) -> None:
        """`engines` has Serve's handles of the engines by deployment."""
        self._given = args
        args = with_access_file(args)
        self._args, hub = args, HubCalls(hub, self._is_idle)
        context = serve.get_replica_context()
        self._name = name = context.replica_id.unique_id
        log_through_serve()
        end_with_raylet()
        keep_calls_on_this_machine()
        allow_open_files()
        use_cpu_policy(args.cpu_policy)
        return_memory()
        self._tracer = open_tracing(args.tracing, name)
        self._log = RequestLog(name)
        self._lines = _line_file(args)
        self._controller = controller = ControllerClient(context.app_name, args.health.status_timeout_s)
        self._links = [ModelLink(args, fleet, engines, name, controller) for fleet in args.served]
        snapshots = {f"{name}/{link.name}": link.snapshot for link in self._links}
        # A request that names no served model is counted for the only model, or for none where there are several.
        self._metrics, own = self._links[0].metrics, next(iter(snapshots))
        if len(self._links) > 1:
            self._metrics, own = Metrics("", name, "ingress"), name
            snapshots[own] = self._metrics.snapshot
        self._garbage, self._lag = GarbagePauses(), LoopLag(is_idle=self._is_idle)
        snapshots[own] = partial(self._of_process, snapshots[own])
        self._reporter = PrefixReporter(
            hub, name, lambda: [link.prefix_report() for link in self._links], args.warm_up.tell_period_s
        )
        self._keeper = MetricsKeeper(hub, name)
        self._versions = {plan.model: Versions(plan) for plan in args.versions}
        self._rollouts = RolloutFollower(hub, args.versions, self._versions)
        self._keys = KeyRing(args.tenants, args.admin_key_hash)
        self._access = AccessControl(
            self._keys,
            context.world_size or args.ingresses.count,
            protects_metrics=args.protects_metrics,
            admin_key_hash=args.admin_key_hash,
        )
        self._roll_call = RollCall(hub, name, self._access.divide_limits)
        self._responses = KeptResponses(args.responses)
        self._spool = None if args.files.directory is None else Spool(args.files)
        self._batches: BatchWorker | None = None
        self._http: HttpServer | None = None
        self._apis: list[LiveApi] = []
        self._user_config: Mapping[str, Any] | None = None
        self._level = LiveLevel()
        self._refuses_settings = False
        self._serves = False
        self._pushers = [
            MetricsPusher(hub, process, snapshot, mirror_to_ray=args.metrics.ray)
            for process, snapshot in snapshots.items()
        ]

    def _is_idle(self) -> bool:
        """Whether no request waits for an engine's answer."""
        return not any(link.num_streams for link in self._links)

    def _of_process(self, snapshot: Callable[[], bytes]) -> bytes:
        """Add the metrics of the whole process to a snapshot."""
        self._garbage.report(self._metrics)
        self._lag.report(self._metrics)
        self._metrics.set("refuses_settings", float(self._refuses_settings))
        self._metrics.set("http_connections", 0 if self._http is None else self._http.num_connections)
        for tenant, num_open in self._access.num_open().items():
            self._metrics.set("tenant_generations", num_open, tenant=tenant)
        return snapshot()

    async def __serve_build_asgi_app__(self) -> Any:
        """Connect and build the API. Serve calls this once, on the event loop that will serve requests."""
        self._keeper.start()
        await asyncio.gather(*(link.start() for link in self._links))
        if self._versions:
            await self._rollouts.ask()
            self._rollouts.start()
        for pusher in self._pushers:
            pusher.start()
        self._reporter.start()
        self._models = {link.name: await asyncio.to_thread(link.served, self._keys) for link in self._links}
        service = self._service(self._args)
        api = await asyncio.to_thread(LiveApi, service)
        self._apis.append(api)
        self._many = ManyPrompts(api, service, self._args.batch, serve_is_stopping)
        if self._spool is not None:
            self._batches = batch_worker(self._spool, api, service, self._args.batch, serve_is_stopping)
        return api

    async def reconfigure(self, user_config: Mapping[str, Any] | None, rank: Any = None) -> None:
        """Take over the settings of a `user_config` (`deployments/config/live.py`); then begin to serve.

        Serve calls this once at the start, whether there is one or not, because `rank` is among its parameters.
        When settings are wrong, a new ingress does not start, and one that serves keeps those it has, because
        Serve would end it if this raised an exception.
        """
        asked, is_first = dict(user_config or {}), self._user_config is None
        if asked == self._user_config and not self._refuses_settings:
            return
        try:
            args = await asyncio.to_thread(lambda: with_access_file(with_live(self._given, asked)))
        except ValueError as error:
            if is_first:
                raise
            self._refuses_settings = True
            logger.error("this ingress keeps its current settings, because the new ones are wrong: %s", error)
            return
        self._refuses_settings = False
        self._level.set(asked.get("logging", {}).get("level"))
        if args != self._args:
            await self._take_over(args)
        self._user_config = asked
        if is_first:
            try:
                await self._open()
            except Exception as error:
                logger.error("this ingress cannot begin to serve: %s", error)  # the caller may be gone
                raise
        else:
            logger.info("new requests use the new settings of user_config")

    async def _take_over(self, args: AppArgs) -> None:
        if args.logging.access_log != self._args.logging.access_log:
            if self._lines is not None:
                self._lines.flush()
                self._lines.close()
            self._lines = _line_file(args)
        self._args, self._keys = args, KeyRing(args.tenants, args.admin_key_hash)
        self._access.take_over(
            self._keys, protects_metrics=args.protects_metrics, admin_key_hash=args.admin_key_hash
        )
        for link in self._links:
            link.take_over(args, self._keys)
        if self._http is not None:
            self._http.take_over(args.limits)
        if self._batches is not None:
            self._batches.max_line_bytes = args.limits.max_body_bytes
        for api in self._apis:
            await api.take_over(self._service(args, like=api.service))

    async def _open(self) -> None:
        """Begin to answer requests, and to work on batches."""
        if self._args.ingresses.http == "direct":
            await self._listen()
        self._roll_call.start()
        self._garbage.settle(full=OFTEN)
        self._lag.start()
        if self._batches is not None:
            self._batches.start()
        self._serves = True

    async def check_health(self) -> None:
        """Raise RuntimeError if this ingress could not begin to serve; Serve then replaces it.

        Serve's controller may die before it learns that a start has failed. The next controller counts an
        ingress as started once its application is built, and from then on calls only this method.
        """
        if not self._serves:
            raise RuntimeError("this ingress could not begin to serve; its log says why")

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        fields: Mapping[str, Any] | None = None,
        *,
        tenant: str | None = None,
        max_in_flight: int | None = None,
    ) -> AsyncGenerator[list[Answer]]:
        """Yield the answers as they come, in lists, for programs that call this through a Serve handle.

        `fields` are for bodies that lack them. Raises `BatchStopped` when this ingress is to stop, or when the
        engines take nothing for too long.
        """
        answers = self._many.answers(prompts, fields, tenant=tenant, max_in_flight=max_in_flight)
        async with aclosing(answers):
            async for ready in answers:
                yield ready

    async def _listen(self) -> None:
        settings = self._args.ingresses
        check_proxy(settings.port, await self._controller.proxy_port())
        service = directly_served(self._service(self._args), settings.max_ongoing)
        api = await asyncio.to_thread(LiveApi, service)
        self._apis.append(api)
        self._http = HttpServer(api, settings, self._args.limits)
        await until_useful(self._http, self._without_engines, self._args.health.migration_wait_s)
        self._http.start()
        logger.info("the API is at http://%s:%d/v1", settings.host, settings.port)

    async def _without_engines(self) -> list[str]:
        """Return the models that lack an engine."""
        lack = await asyncio.gather(*(link.lacks_engines() for link in self._links))
        return [link.name for link, lacks in zip(self._links, lack, strict=True) if lacks]

    def _service(self, args: AppArgs, like: ApiService | None = None) -> ApiService:
        """Return the service with these settings; `like` another one, for clients that come the same way."""
        service = ApiService(
            models=self._models,
            metrics_text=self._keeper.read_page,
            versions=self._versions,
            rollouts=self._rollouts,
            limits=args.limits,
            access=self._access,
            metrics=self._metrics,
            slo=args.slo,
            settings=shown_settings(args),
            shows_tokenizer=args.tokenizer_info,
            responses=self._responses,
            streams=args.streams,
            spool=self._spool,
            admin_key_hash=args.admin_key_hash,
            allowed_hosts=args.ingresses.hosts,
            cors_origins=args.ingresses.cors_origins,
            cluster=self._cluster(),
            listeners=self._listeners(),
            write_line=None if self._lines is None else self._lines.add,
            is_named_outside=True,
            is_stopping=serve_is_stopping,
            ready_without_engines_s=args.health.migration_wait_s,
            refuses_settings=lambda: self._refuses_settings,
        )
        if like is None:
            return service
        return replace(
            service, is_named_outside=like.is_named_outside, max_open=like.max_open, on_named=like.on_named
        )

    def _listeners(self) -> tuple[Listener, ...]:
        """The tracer comes first, because the log line names the trace."""
        traced: tuple[Listener, ...] = () if self._tracer is None else (self._tracer,)
        return (*traced, self._log) if self._args.logging.requests else traced

    def _cluster(self) -> Cluster:
        return Cluster(
            [link.in_cluster() for link in self._links],
            self._controller.view,
            ray.nodes,
            ray.available_resources,
            {"ray": ray.__version__},
            self._args.health.status_timeout_s,
        )

    async def __del__(self) -> None:
        if self._batches is not None:
            await self._batches.aclose()
        # Serve has waited for its own requests; all other requests get the remaining time.
        if self._http is not None:
            await asyncio.sleep(self._args.ingresses.shutdown_delay_s)
        await self._roll_call.leave()
        if self._http is not None:
            await self._http.drain()
        await self._responses.aclose()
        self._lag.close()
        self._reporter.stop()
        self._rollouts.stop()
        self._keeper.stop()
        for pusher in self._pushers:
            pusher.stop()
        for link in self._links:
            await link.aclose()
        if self._lines is not None:
            self._lines.flush()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
