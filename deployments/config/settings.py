"""The sections of `deployments.yaml`: every limit and period that can be set, with its default and unit."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from router.policy_names import check_policy_name

PolicyName = Annotated[str, AfterValidator(check_policy_name)]


class Settings(BaseModel):
    """Frozen; unknown keys are refused; each field says what it means."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RouterSettings(Settings):
    """Where requests go; see `router/policies.py` and `router/cost.py`."""

    policy: PolicyName = "cost"
    """What decides: the cheapest replica; or "session" (sticky by x-session-id), "least_loaded", "rendezvous",
    "random", or a class of one's own as "package.module:Class"."""
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


class HealthSettings(Settings):
    """When a replica counts as lost, and what becomes of its requests."""

    check_period_s: float = Field(default=2.0, gt=0)
    """Seconds between Serve's health checks."""
    check_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds a health check may take."""
    stall_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a finished engine step, while there is work, after which a replica is replaced."""
    beat_directory: str | None = None
    """Directory in which each engine replica keeps an empty file as old as the last health check it passed, for
    supervisors outside Serve (`deployments/replica/pod.py`); None: no files."""
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


class WireSettings(Settings):
    """Where engine replicas listen for ingresses."""

    ports: tuple[int, int] | None = None
    """Lowest and highest TCP port; each replica takes the first that is free on its node. None: any free port.
    Firewalls and NetworkPolicies need a range."""

    @model_validator(mode="after")
    def _ports_are_a_range(self) -> Self:
        if self.ports is not None and not 1024 <= self.ports[0] <= self.ports[1] <= 65535:
            low, high = self.ports
            raise ValueError(f"ports must be [lowest, highest] from 1024 to 65535, got [{low}, {high}]")
        return self


class LogSettings(Settings):
    """What ingresses and engines log, through Ray Serve; see `deployments/telemetry/request_log.py`."""

    encoding: Literal["text", "json"] | None = None
    """Of the log files: "json" is one object a line. None leaves it to Serve's own `logging_config`."""
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """The least that is logged. Requests that failed are warnings, all others are information."""
    directory: str | None = None
    """Where the files go; None: `logs/serve` in Ray's session directory."""
    requests: bool = True
    """Whether each request to generate is logged when it is over."""


class TracingSettings(Settings):
    """OpenTelemetry traces of requests; see `deployments/telemetry/spans.py`. Needs the extra `tracing`.

    Headers, certificates and compression come from the OTEL_EXPORTER_OTLP_* variables of the ingress's process.
    """

    otlp_endpoint: str | None = None
    """URL of an OTLP/HTTP collector, /v1/traces being added where it has no path. None: no traces."""
    service_name: str = "raydix"
    """What traces call this service."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of requests that are traced; one that comes with a `traceparent` follows its caller's decision."""
    max_waiting_spans: int = Field(default=8192, ge=1)
    """Finished spans that wait for the collector, about 2 kB each; the oldest are dropped."""
    export_period_s: float = Field(default=2.0, gt=0)
    """Seconds between exports."""
    export_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds that an export may take, with its retries; as long as an ingress waits for the last one."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_url(cls, given: str | None) -> str | None:
        if given is None:
            return None
        url = urlsplit(given)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"otlp_endpoint must be a URL such as http://collector:4318, got {given!r}")
        return given if url.path.strip("/") else f"{given.rstrip('/')}/v1/traces"


class ChatSettings(Settings):
    """What a model's answers hold besides text; see `deployments/api/output/dialect.py`."""

    tools: Literal["auto", "hermes", "llama3", "none"] = "auto"
    """How the model writes tool calls; "auto" finds it out from the chat template, "none" refuses tools."""
    reasoning: Literal["auto", "think", "none"] = "auto"
    """Whether <think>...</think> at the beginning of an answer is told apart from it; "auto" looks at the chat
    template and the vocabulary."""


class Replicas(Settings):
    """How many replicas of a deployment, and what each takes."""

    count: int = Field(default=1, ge=1)
    """Replicas."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs each reserves in Ray."""
    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs each reserves in Ray; None takes 1 for an engine on "cuda" and 0 otherwise. Where an engine has several
    ranks (`engine.tensor_parallel_size`), each of them reserves this, and CPUs and resources as well."""
    resources: dict[str, float] = {}
    """Custom Ray resources each reserves."""
    max_ongoing: int = Field(default=4096, ge=1)
    """Requests in one replica at once; an engine's real bounds are `engine.max_waiting` and `max_running`."""
    max_queued: int = Field(default=1024, ge=-1)
    """Requests that may wait in a caller for a replica; more are refused. -1: no bound."""
    drain_timeout_s: float = Field(default=120.0, ge=0)
    """Seconds a replica's streams may take to end when it is stopped."""


class AdmissionSettings(Settings):
    """When requests wait in the ingress instead of at an engine, and how long (`deployments/admission/`).

    While they wait, tenants take turns; at an engine `engine.policy` decides. Bounds are per ingress.
    """

    ttft_target_s: float = Field(default=0.15, gt=0)
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


class AutoscalingSettings(Settings):
    """As many engine replicas as the work needs; see `deployments/replica/autoscaling.py`."""

    min: int = Field(default=1, ge=0)
    """Fewest replicas. With 0, a model without any is brought back by POST /v1/models/NAME/load."""
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

    autoscaling: AutoscalingSettings | None = None
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


class SloSettings(Settings):
    """What counts as a good answer: `raydix_slo_requests_total` says how many requests met each target."""

    ttft_s: float = Field(default=1.0, gt=0)
    """Seconds to the first token, of every request that got one."""
    itl_s: float = Field(default=0.1, gt=0)
    """Seconds between tokens, on average over a request, of those with two tokens and more."""
    e2e_s: float = Field(default=30.0, gt=0)
    """Seconds to the end, of requests that were answered in full."""


class MetricsSettings(Settings):
    """Where the metrics can be read besides /metrics, and under which other names."""

    port: int | None = Field(default=None, ge=1, le=65535)
    """Port on which the hub serves /metrics by itself, on the node it runs on; None: on none."""
    host: str = "127.0.0.1"
    """Address it listens on there. Whoever reaches it can read the metrics: this port knows no keys."""
    inference_gateway: bool = False
    """Whether the page has the gauges that Kubernetes' inference gateway reads, under their vllm: names; promtool
    finds fault with the colon."""
    ray: bool = False
    """Whether every process also reports to Ray's own metrics, as ray_raydix_*; see `monitoring/ray_mirror.py`."""


class WarmUpSettings(Settings):
    """What a new engine replica computes before it takes requests; see `deployments/replica/warm_up.py`."""

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
