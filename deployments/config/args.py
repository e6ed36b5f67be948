"""The application's arguments, as `deployments.yaml` gives them. Unknown keys are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from deployments.config.limits import Limits
from deployments.config.settings import (
    AdmissionSettings,
    ChatSettings,
    EngineReplicas,
    HealthSettings,
    LogSettings,
    MetricsSettings,
    Replicas,
    RouterSettings,
    Settings,
    SloSettings,
    TracingSettings,
    WarmUpSettings,
    WireSettings,
)
from deployments.config.tenants import KeyHash, TenantSettings, distinct_tenants
from engine.config import EngineConfig
from engine.drafting.settings import Speculation
from router.placer import PlacerSettings

ENGINE_DEPLOYMENT = "EngineReplica"
"""The engine deployment of an application with one model; of several, each name begins with it."""


def _known_engine_keys(value: Any) -> Any:
    """Pydantic lets a dataclass ignore keys it does not know; a typing error must not go unnoticed."""
    if isinstance(value, dict):
        _refuse_unknown("engine", value, EngineConfig)
        _refuse_unknown("engine.speculation", value.get("speculation"), Speculation)
    return value


def _refuse_unknown(section: str, value: Any, settings: type[Any]) -> None:
    if isinstance(value, dict):
        known = {field.name for field in dataclasses.fields(settings)}
        unknown = sorted(str(key) for key in value.keys() - known)
        if unknown:
            raise ValueError(f"unknown {section} settings {unknown}; there are {sorted(known)}")


CheckedEngineConfig = Annotated[EngineConfig, BeforeValidator(_known_engine_keys)]


class ModelArgs(Settings):
    """One model and the replicas that serve it."""

    engine: CheckedEngineConfig = EngineConfig()
    """Model and engine of each replica. `served_name` tells models of one directory apart."""
    engines: EngineReplicas = EngineReplicas()
    """Engine replicas."""
    chat: ChatSettings = ChatSettings()
    """What its answers hold besides text."""
    load_at_start: bool = True
    """Whether it has replicas from the start; False: from POST /v1/models/{name}/load on."""

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.engine.name

    @property
    def gpus_per_rank(self) -> float:
        """GPUs that Ray reserves for each rank of an engine replica."""
        if self.engines.num_gpus is not None:
            return self.engines.num_gpus
        return 1.0 if self.engine.device.startswith("cuda") else 0.0

    @property
    def gpus_per_engine(self) -> float:
        """GPUs that Ray reserves for an engine replica."""
        return self.gpus_per_rank * self.engine.tensor_parallel_size

    @model_validator(mode="after")
    def _a_rank_takes_one_gpu(self) -> Self:
        size, num_gpus = self.engine.tensor_parallel_size, self.engines.num_gpus
        if size > 1 and num_gpus not in (None, 0, 1):
            raise ValueError(
                f"engines.num_gpus is {num_gpus:g}, but it is for each of the {size} ranks that "
                "engine.tensor_parallel_size makes, which take one GPU each; leave it out"
            )
        return self

    @property
    def num_when_loaded(self) -> int:
        """Replicas that loading it starts."""
        scaling = self.engines.autoscaling
        return self.engines.count if scaling is None else max(1, scaling.initial or scaling.min)


class AccessSettings(Settings):
    """Who may ask, and who may administer."""

    tenants: Annotated[tuple[TenantSettings, ...], AfterValidator(distinct_tenants)] = ()
    """Who may ask. None: the service is open to everybody who can reach it, without limits."""
    admin_key_hash: KeyHash | None = None
    """SHA-256 of the key that administration needs, in hex (`raydix hash-key`). None: it is off."""

    @model_validator(mode="after")
    def _admin_is_nobody_else(self) -> Self:
        for tenant in self.tenants:
            if self.admin_key_hash in tenant.key_hashes:
                raise ValueError(f"admin_key_hash is a key of the tenant {tenant.name!r} too; use another")
        return self


class AppArgs(AccessSettings):
    """Arguments of `deployments.app:build`: one model as `engine` and `engines`, or several as `models`."""

    engine: CheckedEngineConfig = EngineConfig()
    """Model and engine of each replica, where there is one model."""
    engines: EngineReplicas = EngineReplicas()
    """Engine replicas, where there is one model."""
    chat: ChatSettings = ChatSettings()
    """What its answers hold besides text, where there is one model."""
    models: tuple[ModelArgs, ...] = ()
    """Several models, each with engine replicas of its own. Not together with `engine`, `engines` and `chat`."""
    ingresses: Replicas = Replicas(max_ongoing=1000)
    """Ingress replicas: HTTP, chat template, tokenizer. CPU only."""
    limits: Limits = Field(default_factory=lambda: Limits.model_validate({}))
    """Bounds of a single HTTP request."""
    router: RouterSettings = RouterSettings()
    """Where requests go."""
    health: HealthSettings = HealthSettings()
    """When a replica counts as lost."""
    wire: WireSettings = WireSettings()
    """Where engine replicas listen for ingresses."""
    warm_up: WarmUpSettings = WarmUpSettings()
    """What a new engine replica computes before it takes requests."""

    admission: AdmissionSettings = AdmissionSettings()
    """When requests wait in the ingress, and for how long."""
    access_file: str | None = None
    """YAML file that holds `tenants` and `admin_key_hash` instead, read by each ingress at its start: a mounted
    Secret. None: they are here."""
    protect_metrics: bool = False
    """Whether /metrics needs the admin key; /health and /version never need one."""
    slo: SloSettings = SloSettings()
    """Targets that requests are measured by."""
    metrics: MetricsSettings = MetricsSettings()
    """Other ways to the metrics."""
    logging: LogSettings = LogSettings()
    """What is logged, and how."""
    tracing: TracingSettings = TracingSettings()
    """Where OpenTelemetry traces go."""

    @model_validator(mode="before")
    @classmethod
    def _one_form_or_the_other(cls, data: Any) -> Any:
        if isinstance(data, dict) and "models" in data:
            both = sorted({"engine", "engines", "chat"} & data.keys())
            if both:
                raise ValueError(f"give either models or {' and '.join(both)}, not both: move them into models")
            if not data["models"]:
                raise ValueError("models is empty; name at least one model, or leave it out for the embedded one")
        return data

    @model_validator(mode="after")
    def _names_differ(self) -> AppArgs:
        counts = Counter(model.name for model in self.models)
        duplicates = sorted(name for name, count in counts.items() if count > 1)
        if duplicates:
            raise ValueError(f"several models are named {duplicates}; tell them apart with engine.served_name")
        return self

    def placer(self, model: ModelArgs) -> PlacerSettings:
        """How each ingress places a model's requests."""
        return PlacerSettings(
            policy=self.router.policy,
            block_tokens=model.engine.block_tokens,
            key_blocks=self.router.key_blocks,
            max_blocks=self.router.max_blocks,
            expect_s=self.router.expect_s,
            decisions_kept=self.router.decisions_kept,
            hot_tokens=self.warm_up.track_tokens if self.warm_up.max_seconds else 0,
            hot_half_life_s=self.warm_up.half_life_s,
        )

    @model_validator(mode="after")
    def _keys_are_in_one_place(self) -> Self:
        if self.access_file is not None and (self.tenants or self.admin_key_hash):
            raise ValueError("tenants and admin_key_hash are in access_file where there is one; move them there")
        if self.protect_metrics and self.admin_key_hash is None and self.access_file is None:
            raise ValueError("protect_metrics needs an admin_key_hash: it is the admin key that opens /metrics")
        return self

    @property
    def served(self) -> dict[str, ModelArgs]:
        """All models by the name of their engine deployment, which stays the same when others come or go."""
        if not self.models:
            return {ENGINE_DEPLOYMENT: ModelArgs(engine=self.engine, engines=self.engines, chat=self.chat)}
        return {f"{ENGINE_DEPLOYMENT}-{_slug(model.name)}": model for model in self.models}


def _slug(name: str) -> str:
    """`name` as part of a deployment's name: where characters had to go, a digest keeps different names apart."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
