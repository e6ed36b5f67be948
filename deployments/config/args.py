"""The arguments of the application, from `deployments.yaml`. Unknown keys are refused."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from deployments.config.files import FileSettings
from deployments.config.kv_fetch import KvFetchSettings
from deployments.config.limits import Limits
from deployments.config.removed import without_removed
from deployments.config.roles import Pool
from deployments.config.section import Section
from deployments.config.settings import (
    AdmissionSettings,
    BatchSettings,
    ChatSettings,
    DrainSettings,
    EngineDeploymentSettings,
    HealthSettings,
    IngressSettings,
    LogSettings,
    MetricsSettings,
    ResponseSettings,
    RouterSettings,
    SloSettings,
    StreamSettings,
    TracingSettings,
    WarmUpSettings,
    WireSettings,
)
from deployments.config.shared_prefixes import SharedPrefixSettings
from deployments.config.tenants import KeyHash, TenantSettings, distinct_tenants
from deployments.config.versions import (
    RolloutSettings,
    VersionEntry,
    VersionLabel,
    VersionPlan,
    label_of,
    version_plans,
)
from engine.base.machine import CpuPolicy
from engine.base.suggestions import unknown_setting
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.settings.kv_tier import KVTier
from router.placer import PlacerSettings

ENGINE_DEPLOYMENT = "EngineReplica"
"""Name of the only model's engine deployment. Where there are several models, each name begins with it."""


def _known_engine_keys(value: Any) -> Any:
    """Refuse unknown keys: pydantic would ignore them in a dataclass, and a typo would go unnoticed."""
    if isinstance(value, dict):
        _refuse_unknown("", value, EngineConfig)
        _refuse_unknown("speculation: ", value.get("speculation"), Speculation)
        _refuse_unknown("kv_tier: ", value.get("kv_tier"), KVTier)
    return value


def _refuse_unknown(section: str, value: Any, settings: type[Any]) -> None:
    if isinstance(value, dict) and (message := unknown_setting(value, settings.__dataclass_fields__)):
        raise ValueError(section + message)


CheckedEngineConfig = Annotated[EngineConfig, BeforeValidator(_known_engine_keys)]


class ModelArgs(Section):
    """One model and the replicas that serve it."""

    engine: CheckedEngineConfig = EngineConfig()
    """Model and engine of each replica. `served_name` distinguishes models of one directory."""
    engines: EngineDeploymentSettings = EngineDeploymentSettings()
    """Number of engine replicas, and what each reserves."""
    chat: ChatSettings = ChatSettings()
    """Contents of its answers besides text."""
    load_at_start: bool = True
    """Whether the model has replicas from the start; False: only after POST /v1/models/{name}/load."""
    version: VersionLabel | None = None
    """Version of the model; entries with the same name and different versions are one model to clients."""
    weight: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The version's share of the model's sessions, relative to the other versions' weights. None: 1."""
    rollout: RolloutSettings | None = None
    """How the version's share rises from nothing to all; given instead of `weight`. None: it does not."""

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.engine.name

    @property
    def label(self) -> str:
        """The name that distinguishes this version from the model's others."""
        return label_of(self.name, self.version)

    @property
    def gpus_per_rank(self) -> float:
        """GPUs that Ray reserves for each rank of an engine replica."""
        if self.engines.num_gpus is not None:
            return self.engines.num_gpus
        return 1.0 if self.engine.device.startswith("cuda") else 0.0

    @property
    def rank_resources(self) -> dict[str, float]:
        """Resources that Ray reserves for each rank of an engine replica."""
        return self.engines.reserved(self.gpus_per_rank)

    @property
    def gpus_per_stage(self) -> float:
        """GPUs that Ray reserves for a stage of an engine replica. They are in one machine."""
        return self.gpus_per_rank * self.engine.tensor_parallel_size

    @property
    def gpus_per_engine(self) -> float:
        """GPUs that Ray reserves for an engine replica."""
        return self.gpus_per_rank * self.engine.num_ranks

    @model_validator(mode="after")
    def _a_rank_takes_one_gpu(self) -> Self:
        size, num_gpus = self.engine.num_ranks, self.engines.num_gpus
        if size > 1 and num_gpus not in (None, 0, 1):
            raise ValueError(
                f"engines.num_gpus is {num_gpus:g}, but each of the engine's {size} ranks "
                "(engine.tensor_parallel_size times engine.pipeline_parallel_size) needs exactly one GPU; "
                "leave engines.num_gpus out"
            )
        return self

    @model_validator(mode="after")
    def _files_of_pages_are_on_one_machine(self) -> Self:
        engine, placement = self.engine, self.engines.placement
        if engine.kv_tier is not None and engine.pipeline_parallel_size > 1 and placement != "pack":
            raise ValueError(
                f'engines.placement is "{placement}", so the stages of an engine may be on several machines, but '
                "engine.kv_tier needs the files of all stages on one machine: set engines.placement to pack, or "
                "leave engine.kv_tier out"
            )
        return self

    @model_validator(mode="after")
    def _events_need_a_cache(self) -> Self:
        if self.engines.kv_events is not None and not self.engine.prefix_cache:
            raise ValueError(
                "engines.kv_events reports a prefix cache, which engine.prefix_cache: false turns off; remove one"
            )
        return self

    @model_validator(mode="after")
    def _roles_need_fetches(self) -> Self:
        engine, missing = self.engine, ""
        if self.engines.roles is None:
            return self
        if not engine.host_kv_gib:
            missing = "engine.host_kv_gib is 0: set it to the memory for the prompts on their way"
        elif self.engines.kv_fetch is None:
            missing = "engines.kv_fetch is null: leave it out"
        elif not engine.prefix_cache:
            missing = "engine.prefix_cache is false: leave it out"
        if missing:
            raise ValueError(
                f"engines.roles has replicas fetch KV from each other, but {missing}; or remove roles"
            )
        return self

    def deployments(self, name: str) -> dict[str, Pool]:
        """Return the replicas of each of the model's deployments by its name; `name` is the model's own in
        `AppArgs.served`.
        """
        return {pool.deployment(name): pool for pool in self.engines.pools}


class AccessSettings(Section):
    """Tenants that may send requests, and the keys for administration."""

    tenants: Annotated[tuple[TenantSettings, ...], AfterValidator(distinct_tenants)] = ()
    """Tenants that may send requests. Empty: every client that reaches the service may, without limits."""
    admin_key_hash: KeyHash | None = None
    """SHA-256 of the key that administration needs, in hex (`raydix hash-key`). None: administration is off."""

    @model_validator(mode="after")
    def _admin_key_is_no_tenants(self) -> Self:
        for tenant in self.tenants:
            if self.admin_key_hash in tenant.key_hashes:
                raise ValueError(f"admin_key_hash is a key of the tenant {tenant.name!r} too; use another")
        return self


class AppArgs(AccessSettings):
    """Arguments of `deployments.app:build`: one model as `engine` and `engines`, or several as `models`."""

    engine: CheckedEngineConfig = EngineConfig()
    """Model and engine of each replica, for an application with one model."""
    engines: EngineDeploymentSettings = EngineDeploymentSettings()
    """Number of engine replicas, and what each reserves, for an application with one model."""
    chat: ChatSettings = ChatSettings()
    """Contents of answers besides text, for an application with one model."""
    models: tuple[ModelArgs, ...] = ()
    """Several models, each with engine replicas of its own; given instead of `engine`, `engines` and `chat`."""
    ingresses: IngressSettings = IngressSettings()
    """Ingress replicas, which handle HTTP, the chat template and the tokenizer, only on CPUs."""
    limits: Limits = Field(default_factory=lambda: Limits.model_validate({}))
    """Bounds of a single HTTP request."""
    router: RouterSettings = RouterSettings()
    """Which replica a request goes to."""
    health: HealthSettings = HealthSettings()
    """When a replica counts as lost, and what happens to its requests."""
    streams: StreamSettings = StreamSettings()
    """How long streams outlive their readers."""
    drain: DrainSettings = DrainSettings()
    """How engine replicas learn that their machine is about to end."""
    wire: WireSettings = WireSettings()
    """Ports on which engine replicas listen for ingresses."""
    warm_up: WarmUpSettings = WarmUpSettings()
    """Prompts that a new engine replica computes before it takes requests."""
    shared_prefixes: tuple[SharedPrefixSettings, ...] = ()
    """Texts that the operator puts in front of prompts: every engine replica computes each once, for all
    tenants."""

    cpu_policy: CpuPolicy = "batch"
    """How the kernel gives cores to the threads of engines and ingresses: `engine.base.machine.use_cpu_policy`."""

    admission: AdmissionSettings = AdmissionSettings()
    """When requests wait in the ingress, and for how long."""
    responses: ResponseSettings = ResponseSettings()
    """Storage of the Responses API's answers."""
    batch: BatchSettings = BatchSettings()
    """How ingresses send the prompts of batches, files of up to thousands of requests."""
    files: FileSettings = FileSettings()
    """Files and batches that clients leave with the server."""
    access_file: str | None = None
    """YAML file with `tenants` and `admin_key_hash`, such as a mounted Secret; each ingress reads it at its start.
    None: they are given here."""
    protect_metrics: bool | None = None
    """Whether /metrics needs the admin key; None: where there are tenants, whose names and volumes it shows.
    /health and /version never need a key."""
    tokenizer_info: bool = True
    """Whether /tokenizer_info shows the configuration of tokenizers, with their chat templates."""
    slo: SloSettings = SloSettings()
    """Service-level targets that requests are measured against."""
    metrics: MetricsSettings = MetricsSettings()
    """Where the metrics can be read besides /metrics."""
    logging: LogSettings = LogSettings()
    """Contents and format of logs."""
    tracing: TracingSettings = TracingSettings()
    """Where OpenTelemetry traces go."""

    @model_validator(mode="before")
    @classmethod
    def _one_form_or_the_other(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = without_removed(data)
        if isinstance(data, dict) and "models" in data:
            both = sorted({"engine", "engines", "chat"} & data.keys())
            if both:
                raise ValueError(f"give either models or {' and '.join(both)}, not both: move them into models")
            if not data["models"]:
                raise ValueError("models is empty; name at least one model, or leave it out for the embedded one")
        return data

    @model_validator(mode="after")
    def _names_differ(self) -> AppArgs:
        counts = Counter(model.label for model in self.models)
        duplicates = sorted(name for name, count in counts.items() if count > 1)
        if duplicates:
            raise ValueError(
                f"several models are named {duplicates}; give each another engine.served_name, or, if they are "
                "versions of one model, another version"
            )
        _ = self.versions
        return self

    @property
    def versions(self) -> tuple[VersionPlan, ...]:
        """The models that have versions. Raises ValueError for versions that contradict each other."""
        return version_plans([VersionEntry(m.name, m.version, m.weight, m.rollout) for m in self.models])

    def placer(self, model: ModelArgs) -> PlacerSettings:
        """How each ingress chooses replicas for a model's requests."""
        return PlacerSettings(
            policy=self.router.policy,
            block_tokens=model.engine.block_tokens,
            key_blocks=self.router.key_blocks,
            max_blocks=None if self.router.max_blocks == "auto" else self.router.max_blocks,
            expect_s=self.router.expect_s,
            decisions_kept=self.router.decisions_kept,
            hot_tokens=self.warm_up.track_tokens if self.warm_up.max_seconds else 0,
            hot_half_life_s=self.warm_up.half_life_s,
            **_kept(model.engines.kv_fetch),
            apart_above_tokens=None if (roles := model.engines.roles) is None else roles.disaggregate_above_tokens,
        )

    @model_validator(mode="after")
    def _shared_prefixes_have_a_cache(self) -> Self:
        without = [model.name for model in self.served.values() if not model.engine.prefix_cache]
        if self.shared_prefixes and without:
            raise ValueError(
                f"shared_prefixes are kept in prefix caches, but {without} have engine.prefix_cache: false; "
                "set it to true or leave shared_prefixes out"
            )
        return self

    @model_validator(mode="after")
    def _keys_are_in_one_place(self) -> Self:
        if self.access_file is not None and (self.tenants or self.admin_key_hash):
            raise ValueError(
                "tenants and admin_key_hash are given both here and by access_file; move them all into that file"
            )
        if self.protect_metrics and self.admin_key_hash is None and self.access_file is None:
            raise ValueError(
                "protect_metrics needs an admin_key_hash, because /metrics then asks for the admin key; set one"
            )
        return self

    @property
    def protects_metrics(self) -> bool:
        """Whether /metrics needs the admin key. The tenants of an `access_file` must have been read."""
        return bool(self.tenants) if self.protect_metrics is None else self.protect_metrics

    @property
    def served(self) -> dict[str, ModelArgs]:
        """All models by the names of their engine deployments, which do not depend on the other models.

        Where replicas have roles, the deployments' names are those of `ModelArgs.deployments`.
        """
        if not self.models:
            return {ENGINE_DEPLOYMENT: ModelArgs(engine=self.engine, engines=self.engines, chat=self.chat)}
        return {f"{ENGINE_DEPLOYMENT}-{_slug(model.label)}": model for model in self.models}

    @property
    def pools(self) -> dict[str, Pool]:
        """The replicas of all engine deployments by name."""
        served = self.served.items()
        return {deployment: pool for name, model in served for deployment, pool in model.deployments(name).items()}


def _kept(kv_fetch: KvFetchSettings | None) -> dict[str, int]:
    """The settings of a placer that decide which prefixes outlive a replica."""
    if kv_fetch is None:
        return {"keep_tokens": 0}
    return {"keep_tokens": kv_fetch.keep_tokens, "keep_at_once": kv_fetch.max_transfers}


def _slug(name: str) -> str:
    """`name` as part of a deployment's name; where characters are replaced, a digest keeps it distinct."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
