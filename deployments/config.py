"""The application's arguments, as `deployments.yaml` gives them. Unknown keys are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from deployments.api.limits import Limits
from deployments.tenants import KeyHash, TenantSettings, distinct_tenants
from engine.config import EngineConfig
from router.placer import PlacerSettings

PolicyName = Literal["cost", "session", "least_loaded", "rendezvous", "random"]

ENGINE_DEPLOYMENT = "EngineReplica"
"""The engine deployment of an application with one model; of several, each name begins with it."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _known_engine_keys(value: Any) -> Any:
    """Pydantic lets a dataclass ignore keys it does not know; a typing error must not go unnoticed."""
    if isinstance(value, dict):
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        unknown = sorted(str(key) for key in value.keys() - known)
        if unknown:
            raise ValueError(f"unknown engine settings {unknown}; there are {sorted(known)}")
    return value


class RouterSettings(_Settings):
    """Where requests go; see `router/policies.py` and `router/cost.py`."""

    policy: PolicyName = "cost"
    """What decides: the cheapest replica; or "session" (sticky by x-session-id), "least_loaded", "rendezvous",
    "random"."""
    key_blocks: int = Field(default=4, ge=1)
    """Prompts that nobody holds are kept together by their first so many blocks (of `engine.block_tokens`)."""
    max_blocks: int = Field(default=4_000_000, ge=1)
    """Distinct blocks that each ingress's index of cached prefixes keeps, of about 130 bytes each."""
    expect_s: float = Field(default=10.0, ge=0)
    """Seconds for which a dispatched prompt counts as cached before its replica confirms it."""
    decisions_kept: int = Field(default=1000, ge=1)
    """Decisions that /v1/router/decisions can show."""
    sync_timeout_s: float = Field(default=10.0, ge=0)
    """Seconds a new ingress waits for the replicas' prefixes before it takes requests without them."""


class HealthSettings(_Settings):
    """When a replica counts as lost, and what becomes of its requests."""

    check_period_s: float = Field(default=2.0, gt=0)
    """Seconds between Serve's health checks."""
    check_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds a health check may take."""
    stall_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a finished engine step, while there is work, after which a replica is replaced."""
    heartbeat_s: float = Field(default=0.05, gt=0, le=1)
    """Longest silence of a replica on the wire, in seconds."""
    status_timeout_s: float = Field(default=3.0, gt=0)
    """Seconds that an ingress waits for Ray or Serve to tell the state of things; then it does without."""
    lost_after_s: float = Field(default=3.0, gt=0)
    """Seconds of silence on the wire after which an ingress takes a replica's streams elsewhere."""
    max_retries: int = Field(default=2, ge=0)
    """Replicas that may be lost with a request before its first token."""
    max_migrations: int = Field(default=3, ge=0)
    """Replicas that may be lost with a stream after its first token; then it ends with an error."""
    migration_wait_s: float = Field(default=30.0, ge=0)
    """Seconds a stream that lost its replica waits for another one with room."""
    hedge_after_s: float | None = Field(default=None, gt=0)
    """Seconds without a first token after which a second replica is asked too; None: never."""
    hedge_share: float = Field(default=0.05, ge=0, le=1)
    """Most requests of which that is done, as a share of all."""


class Replicas(_Settings):
    """How many replicas of a deployment, and what each takes."""

    count: int = Field(default=1, ge=1)
    """Replicas."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs each reserves in Ray."""
    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs each reserves in Ray; None takes 1 for an engine on "cuda" and 0 otherwise."""
    resources: dict[str, float] = {}
    """Custom Ray resources each reserves."""
    max_ongoing: int = Field(default=4096, ge=1)
    """Requests in one replica at once; an engine's real bounds are `engine.max_waiting` and `max_running`."""
    max_queued: int = Field(default=1024, ge=-1)
    """Requests that may wait in a caller for a replica; more are refused. -1: no bound."""
    drain_timeout_s: float = Field(default=120.0, ge=0)
    """Seconds a replica's streams may take to end when it is stopped."""


class AdmissionSettings(_Settings):
    """When requests wait in the ingress instead of at an engine, and for how long; see `deployments/admission.py`.

    While they wait, tenants take turns; at an engine it is first come, first served. Bounds are per ingress.
    """

    ttft_target_s: float = Field(default=0.25, gt=0)
    """Seconds of work queued at the least busy engine above which requests wait: about what a tenant's flood adds
    to another's time to first token. An engine runs dry when it is shorter than a few of its steps."""
    max_wait_s: float = Field(default=30.0, gt=0)
    """Longest wait, in seconds; a request may ask for less. Those that would wait longer are refused at once."""
    quantum_tokens: int = Field(default=2048, ge=1)
    """Uncached prompt tokens that the tenant of the least weight may send each time it is its turn."""
    max_waiting: int = Field(default=4096, ge=1)
    """Requests that wait, of all tenants."""
    max_waiting_tokens: int = Field(default=16_000_000, ge=1)
    """Uncached prompt tokens that wait, of all tenants."""
    max_waiting_per_tenant: int = Field(default=1024, ge=1)
    """Requests of one tenant that wait."""
    max_waiting_tokens_per_tenant: int = Field(default=4_000_000, ge=1)
    """Uncached prompt tokens of one tenant that wait; a single request may be larger."""


class Autoscaling(_Settings):
    """As many engine replicas as the work needs; see `deployments/autoscaling.py`."""

    min: int = Field(default=1, ge=0)
    """Fewest replicas."""
    max: int = Field(ge=1)
    """Most replicas."""
    initial: int | None = Field(default=None, ge=0)
    """Replicas to begin with; None begins with `min`."""
    ttft_target_s: float = Field(default=1.0, gt=0)
    """Seconds that a prompt may wait behind the prefill of others, on average over the replicas."""
    max_busy_share: float = Field(default=0.85, gt=0, le=1)
    """Share of a replica's measured prefill rate that may be in use."""
    max_kv_share: float = Field(default=0.85, gt=0, le=1)
    """Share of a replica's KV pages, and of its places in the batch, that may be in use or waited for."""
    headroom: float = Field(default=0.3, ge=0, lt=1)
    """Share of all of these that stays unused after going down: what keeps the number from going up and down."""
    upscale_delay_s: float = Field(default=10.0, ge=0)
    """Seconds for which more replicas must be wanted before they are started."""
    downscale_delay_s: float = Field(default=300.0, ge=0)
    """Seconds for which fewer must be wanted before some are stopped."""
    downscale_to_zero_delay_s: float | None = Field(default=None, ge=0)
    """The same for the last replica, where `min` is 0; None takes `downscale_delay_s`."""
    look_back_s: float = Field(default=15.0, gt=0)
    """Seconds of work that a decision looks at."""
    report_s: float = Field(default=2.0, gt=0)
    """Seconds between a replica's reports."""

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max ({self.max}) must be at least min ({self.min})")
        if self.initial is not None and not self.min <= self.initial <= self.max:
            raise ValueError(f"initial ({self.initial}) must be from min ({self.min}) to max ({self.max})")
        return self


class EngineReplicas(Replicas):
    """Engine replicas: a fixed `count`, or as many as the work needs."""

    autoscaling: Autoscaling | None = None
    """Replaces `count`."""

    @property
    def num_expected(self) -> int:
        """Replicas that there are when all is well, at least."""
        return self.count if self.autoscaling is None else self.autoscaling.min

    @model_validator(mode="after")
    def _count_or_autoscaling(self) -> Self:
        if self.autoscaling is not None and "count" in self.model_fields_set:
            raise ValueError(
                f"count ({self.count}) and autoscaling (min {self.autoscaling.min}, max {self.autoscaling.max}) "
                "exclude each other: leave out count to have the number follow the work, or autoscaling to fix it"
            )
        return self


class WarmUp(_Settings):
    """What a new engine replica computes before it takes requests; see `deployments/warm_up.py`."""

    max_seconds: float = Field(default=30.0, ge=0)
    """Seconds it may take; 0 lets replicas start cold."""
    max_kv_share: float = Field(default=0.5, gt=0, le=1)
    """Share of its KV pages that may be filled."""
    ask_timeout_s: float = Field(default=3.0, gt=0)
    """Seconds to wait for the answer what to compute."""
    half_life_s: float = Field(default=600.0, gt=0)
    """Seconds after which the use of a prefix counts half."""
    track_tokens: int = Field(default=4_000_000, ge=1024)
    """Tokens of prompts' beginnings that each ingress keeps track of: 0.5 bytes each, and 4 more where shared."""
    max_tokens: int = Field(default=250_000, ge=1)
    """Most tokens of prefixes that an ingress tells of, 4 bytes each."""
    tell_period_s: float = Field(default=5.0, gt=0)
    """Seconds between that."""


Engine = Annotated[EngineConfig, BeforeValidator(_known_engine_keys)]


class ModelArgs(_Settings):
    """One model and the replicas that serve it."""

    engine: Engine = EngineConfig()
    """Model and engine of each replica. `served_name` tells models of one directory apart."""
    engines: EngineReplicas = EngineReplicas()
    """Engine replicas."""
    load_at_start: bool = True
    """Whether it has replicas from the start; False: from POST /v1/models/{name}/load on."""

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.engine.name

    @property
    def gpus_per_engine(self) -> float:
        """GPUs that Ray reserves for an engine replica."""
        if self.engines.num_gpus is not None:
            return self.engines.num_gpus
        return 1.0 if self.engine.device.startswith("cuda") else 0.0

    @property
    def num_when_loaded(self) -> int:
        """Replicas that loading it starts."""
        scaling = self.engines.autoscaling
        return self.engines.count if scaling is None else max(1, scaling.initial or scaling.min)


class AppArgs(_Settings):
    """Arguments of `deployments.app:build`: one model as `engine` and `engines`, or several as `models`."""

    engine: Engine = EngineConfig()
    """Model and engine of each replica, where there is one model."""
    engines: EngineReplicas = EngineReplicas()
    """Engine replicas, where there is one model."""
    models: tuple[ModelArgs, ...] = ()
    """Several models, each with engine replicas of its own. Not together with `engine` and `engines`."""
    ingresses: Replicas = Replicas(max_ongoing=1000)
    """Ingress replicas: HTTP, chat template, tokenizer. CPU only."""
    limits: Limits = Field(default_factory=lambda: Limits.model_validate({}))
    """Bounds of a single HTTP request."""
    router: RouterSettings = RouterSettings()
    """Where requests go."""
    health: HealthSettings = HealthSettings()
    """When a replica counts as lost."""
    warm_up: WarmUp = WarmUp()
    """What a new engine replica computes before it takes requests."""

    admission: AdmissionSettings = AdmissionSettings()
    """When requests wait in the ingress, and for how long."""
    tenants: Annotated[tuple[TenantSettings, ...], AfterValidator(distinct_tenants)] = ()
    """Who may ask. None: the service is open to everybody who can reach it, without limits."""
    admin_key_hash: KeyHash | None = None
    """SHA-256 of the key that administration needs, in hex (`raydix hash-key`). None: it is off."""
    protect_metrics: bool = False
    """Whether /metrics needs the admin key; /health and /version never need one."""

    @model_validator(mode="before")
    @classmethod
    def _one_form_or_the_other(cls, data: Any) -> Any:
        if isinstance(data, dict) and "models" in data:
            both = sorted({"engine", "engines"} & data.keys())
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
    def _check_admin_key(self) -> Self:
        if self.protect_metrics and self.admin_key_hash is None:
            raise ValueError("protect_metrics needs an admin_key_hash: it is the admin key that opens /metrics")
        for tenant in self.tenants:
            if self.admin_key_hash in tenant.key_hashes:
                raise ValueError(f"admin_key_hash is a key of the tenant {tenant.name!r} too; use another")
        return self

    @property
    def served(self) -> dict[str, ModelArgs]:
        """All models by the name of their engine deployment, which stays the same when others come or go."""
        if not self.models:
            return {ENGINE_DEPLOYMENT: ModelArgs(engine=self.engine, engines=self.engines)}
        return {f"{ENGINE_DEPLOYMENT}-{_slug(model.name)}": model for model in self.models}


def _slug(name: str) -> str:
    """`name` as part of a deployment's name: where characters had to go, a digest keeps different names apart."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
