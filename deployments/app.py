"""Builds the application: `serve run deployments.yaml` calls `build`, which wires the deployments together.

Ingress ──handle with PrefixRouter, one per model and role──▶ EngineReplica
   └──────────────────▶ MetricsHub ◀────────────────────┘
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from pydantic import ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException

from deployments.api.responses.kept import check_store
from deployments.config.args import ENGINE_DEPLOYMENT, AppArgs, ModelArgs
from deployments.config.chosen import choose
from deployments.config.faults import first_fault
from deployments.config.placement import strategy
from deployments.config.roles import Pool
from deployments.config.settings import DeploymentSettings
from deployments.control.hardware import cluster
from deployments.control.model_files import check_model_files, known_facts
from deployments.control.surge import surge_percent
from deployments.hub.deployment import MetricsHub, deployed_ingresses
from deployments.ingress.deployment import Ingress
from deployments.replica.autoscaling import TARGETS
from deployments.replica.deployment import EngineFactory, EngineReplica
from deployments.replica.ranks import bundles, load_engine
from deployments.replica.settings import ReplicaSettings
from deployments.telemetry.serve_logging import serve_logging
from deployments.telemetry.tracing import check_tracing
from router.policy_names import policy_named

logger = logging.getLogger("ray.serve")


class ConfigRefused(RayServeException, ValueError):
    """No replica could start with this config. Serve shows only the message of this exception, and does not
    retry.
    """


def build(args: AppArgs | dict[str, Any]) -> Application:
    """Build the application that `args` describes. Raises ConfigRefused.

    Serve calls this before it stops anything. After an exception the application stays unchanged, and
    `serve status` shows the message. Settings that `args`, read from a file, omit are chosen for the cluster
    (`deployments/config/chosen.py`); in `AppArgs` they stay as they are.
    """
    try:
        checked = args if isinstance(args, AppArgs) else AppArgs.model_validate(_chosen(args))
        check_model_files(checked)
        return build_with(checked, partial(load_engine, health=checked.health))
    except ValidationError as error:
        raise ConfigRefused(first_fault(error, "args")) from None
    except ValueError as error:
        raise ConfigRefused(str(error)) from None


def _chosen(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments, with omitted settings chosen for the cluster. Raises ValueError."""
    [effective] = choose([args], cluster(), known_facts)
    for choice in effective.choices:
        logger.info("%s is %s: %s", choice.path, choice.value, choice.reason)
    for warning in effective.warnings:
        logger.warning("%s", warning)
    return effective.args


def build_with(args: AppArgs, engine_factory: EngineFactory) -> Application:
    """Build the application that `args` describes, with engines that `engine_factory` makes."""
    check_tracing(args.tracing)
    check_store(args.responses)
    args = args.model_copy(update={"shared_prefixes": tuple(prefix.read() for prefix in args.shared_prefixes)})
    policy_named(args.router.policy)  # An unusable class is refused here, before any ingress starts.
    hub = serve.deployment(
        MetricsHub,
        name="MetricsHub",
        num_replicas=1,
        health_check_period_s=args.health.check_period_s,
        health_check_timeout_s=args.health.check_timeout_s,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0},
        user_config={},
        logging_config={"enable_access_log": False} | (serve_logging(args.logging) or {}),
    ).bind(args.ingresses.count, args.metrics, deployed_ingresses, args.versions)
    engines: dict[str, Application] = {}
    for name, model in args.served.items():
        engines |= bind_engines(args, model, hub, name, engine_factory)
    return bind_ingress(args, engines, hub)


def bind_engines(
    args: AppArgs,
    model: ModelArgs,
    hub: Any,
    name: str = ENGINE_DEPLOYMENT,
    engine_factory: EngineFactory = load_engine,
) -> dict[str, Application]:
    """Bind one model's engine replicas, behind their router: by deployment, of which roles make several.

    `name` is the deployment's name without roles.
    """
    router = RequestRouterConfig(
        request_router_class="router.ray_router:PrefixRouter",
        request_router_kwargs={"fleet": name, **asdict(args.placer(model))},
    )
    num_sharing = sum(model.engines.num_expected * model.engine.num_ranks for model in args.served.values())
    settings = ReplicaSettings(
        num_sharing=num_sharing if model.engines.num_cpus < 1 else None,
        ranks={
            deployment: each.engine.num_ranks
            for served, each in args.served.items()
            for deployment in each.deployments(served)
        },
        health=args.health,
        streams=args.streams,
        drain=args.drain,
        wire=args.wire,
        metrics=args.metrics,
        warm_up=args.warm_up,
        chat=model.chat,
        shared_prefixes=args.shared_prefixes,
        kv_events=model.engines.kv_events,
        kv_fetch=model.engines.kv_fetch,
        cpu_policy=args.cpu_policy,
    )
    engine = model.engine if model.version is None else replace(model.engine, served_name=model.label)
    size, stages, placement = engine.tensor_parallel_size, engine.pipeline_parallel_size, model.engines.placement
    surge = model.engines.surge_percent
    surge = surge_percent(surge, model.rank_resources, size, num_stages=stages, placement=placement)
    options = _options(args, model.engines, model.gpus_per_rank, surge)
    if engine.num_ranks > 1:
        options["placement_group_bundles"] = bundles(engine, options["ray_actor_options"])
        options["placement_group_strategy"] = strategy(stages, placement)
    return {
        deployment: serve.deployment(
            EngineReplica,
            name=deployment,
            request_router_config=router,
            **options,
            **_size(pool, model.load_at_start),
        ).bind(engine, replace(settings, role=pool.role), hub, engine_factory)
        for deployment, pool in model.deployments(name).items()
    }


def bind_ingress(args: AppArgs, engines: dict[str, Application], hub: Any) -> Application:
    """Bind the ingress replicas in front of the models' engines; `engines` has them by deployment."""
    num_gpus = args.ingresses.num_gpus or 0.0
    surge = surge_percent(args.ingresses.surge_percent, args.ingresses.reserved(num_gpus))
    options = _options(args, args.ingresses, num_gpus, surge)
    count = args.ingresses.count
    return serve.deployment(Ingress, name="Ingress", num_replicas=count, **options).bind(args, engines, hub)


def _size(pool: Pool, load_at_start: bool) -> dict[str, Any]:
    """Return Serve's options for the number of a deployment's replicas."""
    if pool.scaling is None and load_at_start:
        return {"num_replicas": pool.least}
    return {"autoscaling_config": _autoscaling(pool, load_at_start)}


def _autoscaling(pool: Pool, load_at_start: bool = True) -> AutoscalingConfig:
    """Return Serve's autoscaling settings, with the policy that counts work.

    Serve's minimum is always 0, so that an unloaded model stays unloaded (`control/model_switch.py`); the policy
    enforces the configured minimum while the model is loaded.
    """
    settings = pool.scaling
    if settings is None:  # not loaded at the start: only an autoscaled deployment can start with no replicas
        policy = AutoscalingPolicy(policy_function="deployments.replica.autoscaling:keep")
        return AutoscalingConfig(min_replicas=0, initial_replicas=0, max_replicas=pool.least, policy=policy)
    initial = settings.min if settings.initial is None else settings.initial
    policy = AutoscalingPolicy(
        policy_function="deployments.replica.autoscaling:WorkPolicy",
        policy_kwargs={"least": settings.min, "role": pool.role, **settings.model_dump(include=set(TARGETS))},
    )
    with warnings.catch_warnings():
        # Ray 2.60 reads `metrics_interval_s`, and not yet the environment variables that will replace it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=0,
            max_replicas=settings.max,
            initial_replicas=initial if load_at_start else 0,
            upscale_delay_s=settings.upscale_delay_s,
            downscale_delay_s=settings.downscale_delay_s,
            downscale_to_zero_delay_s=settings.downscale_to_zero_delay_s,
            metrics_interval_s=settings.report_s,
            look_back_period_s=settings.look_back_s,
            policy=policy,
        )


def _options(args: AppArgs, replicas: DeploymentSettings, num_gpus: float, surge: int) -> dict[str, Any]:
    """Return Serve's options for a deployment, independent of the number of its replicas."""
    return {
        "max_surge_percent": surge,
        "user_config": {},  # Not None, because Serve then notifies replicas when the file no longer has any.
        "max_ongoing_requests": replicas.max_ongoing,
        "max_queued_requests": replicas.max_queued,
        "graceful_shutdown_timeout_s": replicas.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "logging_config": serve_logging(args.logging),
        "health_check_period_s": args.health.check_period_s,
        "health_check_timeout_s": args.health.check_timeout_s,
        "ray_actor_options": {
            "num_cpus": replicas.num_cpus,
            "num_gpus": num_gpus,
            "resources": dict(replicas.resources),
        },
    }
