"""The ingress deployment: the OpenAI API over the engines. It needs CPUs alone, and any number of them may run."""

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

from deployments.api.app import create_app
from deployments.api.http.access import AccessControl
from deployments.api.record import Listener
from deployments.api.responses.kept import KeptResponses
from deployments.api.service import ApiService
from deployments.batch.batch_worker import BatchWorker
from deployments.batch.prompts import Answer, Prompt
from deployments.batch.spool import Spool
from deployments.config.args import AppArgs
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
from deployments.telemetry.garbage import OFTEN, GarbagePauses
from deployments.telemetry.line_file import LineFile
from deployments.telemetry.loop_lag import LoopLag
from deployments.telemetry.metrics_push import MetricsPusher
from deployments.telemetry.request_log import RequestLog
from deployments.telemetry.serve_logging import log_through_serve
from deployments.telemetry.tracing import open_tracing
from deployments.wire.open_files import allow_open_files
from engine.machine import use_cpu_policy
from monitoring.metrics import Metrics
from router.ray_internals import request_namer, serve_is_stopping

logger = logging.getLogger("ray.serve")


def directly_served(service: ApiService, max_open: int) -> ApiService:
    """Return the service for clients without a proxy between: it does what Serve's proxy and replica do else."""
    return replace(
        service,
        is_named_outside=False,
        max_open=max_open,
        on_named=request_namer(),
    )


@serve.ingress()
class Ingress:
    """Builds the API over this process's connections to the engines."""

    def __init__(self, args: AppArgs, engines: dict[str, Any], hub: Any) -> None:
        """`engines` has Serve's handles of the engines by deployment."""
        args = with_access_file(args)
        self._args, hub = args, HubCalls(hub, self._is_idle)
        context = serve.get_replica_context()
        self._name = name = context.replica_id.unique_id
        log_through_serve()
        end_with_raylet()
        allow_open_files()
        use_cpu_policy(args.cpu_policy)
        self._tracer = open_tracing(args.tracing, name)
        self._log = RequestLog(name)
        self._lines = None if args.logging.access_log is None else LineFile(args.logging.access_log)
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
        self._keys = KeyRing(args.tenants, args.admin_key_hash)
        self._access = AccessControl(
            self._keys,
            args.ingresses.count,
            protects_metrics=args.protects_metrics,
            admin_key_hash=args.admin_key_hash,
        )
        self._roll_call = RollCall(hub, name, self._access.divide_limits)
        self._responses = KeptResponses(args.responses)
        self._spool = None if args.files.directory is None else Spool(args.files)
        self._batches: BatchWorker | None = None
        self._http: HttpServer | None = None
        self._pushers = [
            MetricsPusher(hub, process, snapshot, mirror_to_ray=args.metrics.ray)
            for process, snapshot in snapshots.items()
        ]

    def _is_idle(self) -> bool:
        """Whether no request waits for an engine's answer."""
        return not any(link.num_streams for link in self._links)

    def _of_process(self, snapshot: Callable[[], bytes]) -> bytes:
        """Add what is the whole process's to a snapshot."""
        self._garbage.report(self._metrics)
        self._lag.report(self._metrics)
        self._metrics.set("http_connections", 0 if self._http is None else self._http.num_connections)
        for tenant, num_open in self._access.num_open().items():
            self._metrics.set("tenant_generations", num_open, tenant=tenant)
        return snapshot()

    async def __serve_build_asgi_app__(self) -> Any:
        """Connect and build the API. Serve calls this once, on the event loop that will serve requests."""
        self._keeper.start()
        await asyncio.gather(*(link.start() for link in self._links))
        for pusher in self._pushers:
            pusher.start()
        self._reporter.start()
        service = await asyncio.to_thread(self._service)
        if self._args.ingresses.http == "direct":
            await self._listen(directly_served(service, self._args.ingresses.max_ongoing))
        self._roll_call.start()
        app = create_app(service, at_once=True)
        self._garbage.settle(full=OFTEN)
        self._lag.start()
        self._many = ManyPrompts(app, service, self._args.batch, serve_is_stopping)
        if self._spool is not None:
            self._batches = batch_worker(self._spool, app, service, self._args.batch, serve_is_stopping)
            self._batches.start()
        return app

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        fields: Mapping[str, Any] | None = None,
        *,
        tenant: str | None = None,
        max_in_flight: int | None = None,
    ) -> AsyncGenerator[list[Answer]]:
        """Yield the answers as they come, in lists: for programs that call this through a Serve handle.

        `fields` are for bodies that lack them. Raises `BatchStopped` when this ingress is to stop, or when the
        engines take nothing for too long.
        """
        answers = self._many.answers(prompts, fields, tenant=tenant, max_in_flight=max_in_flight)
        async with aclosing(answers):
            async for ready in answers:
                yield ready

    async def _listen(self, service: ApiService) -> None:
        settings = self._args.ingresses
        check_proxy(settings.port, await self._controller.proxy_port())
        self._http = HttpServer(create_app(service, at_once=True), settings, self._args.limits)
        await until_useful(self._http, self._without_engines, self._args.health.migration_wait_s)
        self._http.start()
        logger.info("the API is at http://%s:%d/v1", settings.host, settings.port)

    async def _without_engines(self) -> list[str]:
        """Return the models that lack an engine."""
        lack = await asyncio.gather(*(link.lacks_engines() for link in self._links))
        return [link.name for link, lacks in zip(self._links, lack, strict=True) if lacks]

    def _service(self) -> ApiService:
        args = self._args
        models = [link.served(self._keys) for link in self._links]
        return ApiService(
            models={served.card.id: served for served in models},
            metrics_text=self._keeper.read_page,
            limits=args.limits,
            access=self._access,
            metrics=self._metrics,
            slo=args.slo,
            settings=shown_settings(args),
            shows_tokenizer=args.tokenizer_info,
            responses=self._responses,
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
        # Serve has waited for the requests that came through it, and gives the others what is left of the time.
        if self._http is not None:
            await asyncio.sleep(self._args.ingresses.shutdown_delay_s)
        await self._roll_call.leave()
        if self._http is not None:
            await self._http.drain()
        await self._responses.aclose()
        self._lag.close()
        self._reporter.stop()
        self._keeper.stop()
        for pusher in self._pushers:
            pusher.stop()
        for link in self._links:
            await link.aclose()
        self._log.flush()
        if self._lines is not None:
            self._lines.flush()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
