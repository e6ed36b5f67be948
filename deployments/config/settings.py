"""The sections of `deployments.yaml`: every limit and period that can be set, with its default and unit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.config.autoscaling import AutoscalingSettings
from deployments.config.hosts import LOCAL_HOSTS, check_host, check_origin, is_local
from deployments.config.kv_events import KvEventSettings
from deployments.config.kv_fetch import KvFetchSettings
from deployments.config.placement import Placement
from deployments.config.roles import Pool, RoleSettings
from deployments.config.section import Section
from router.policy_names import check_policy_name

PolicyName = Annotated[str, AfterValidator(check_policy_name)]


CLOUDS = ("aws", "gcp", "azure")
"""Clouds whose metadata services announce the end of a machine."""
Surge = Annotated[int, Field(ge=0, le=100)]


def _known_notice(given: str) -> str:
    """Check a source of notices."""
    is_url = urlsplit(given).scheme in ("http", "https") and bool(urlsplit(given).hostname)
    if not (given in CLOUDS or is_url or Path(given).is_absolute()):
        raise ValueError(
            f'notice must be "aws", "gcp", "azure", a URL such as http://127.0.0.1:1338/notice, or an absolute '
            f"path, got {given!r}"
        )
    return given


class RouterSettings(Section):
    """Which replica a request goes to; see `router/policies.py` and `router/cost.py`."""

    policy: PolicyName = "cost"
    """How a replica is chosen: "cost" takes the cheapest, "session" keeps to the one of the x-session-id; also
    "least_loaded", "rendezvous", "random", or a class of your own as "package.module:Class"."""
    key_blocks: int = Field(default=4, ge=1)
    """Prompts that no replica has cached go to the same one if they share this many first blocks (of
    `engine.block_tokens`)."""
    max_blocks: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Most blocks that each ingress's index of cached prefixes holds, at about 130 bytes each. "auto": as many as
    the replicas' KV memory holds, at least 4 and at most 16 million."""
    expect_s: float = Field(default=10.0, ge=0)
    """Seconds for which a dispatched prompt counts as cached before its replica confirms it."""
    decisions_kept: int = Field(default=1000, ge=1)
    """Number of latest decisions that /v1/router/decisions can show."""
    sync_timeout_s: float = Field(default=10.0, ge=0)
    """Seconds that a new ingress waits to learn the hottest of each replica's cached prefixes before it takes
    requests anyway. It learns the others while it serves."""


class HealthSettings(Section):
    """When a replica counts as lost, and what happens to its requests."""

    check_period_s: float = Field(default=2.0, gt=0)
    """Seconds between Serve's health checks."""
    check_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds a health check may take."""
    stall_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a finished engine step, while there is work, after which Serve replaces a replica."""
    max_failed_steps: int = Field(default=3, ge=2)
    """Steps of an engine that may fail in a row before Serve replaces its replica. After a failed step the engine
    repeats it with harmless requests, so that no request of a client can fail two in a row."""
    beat_directory: str | None = None
    """Directory in which each engine replica touches a file whenever it passes a health check, for supervisors
    outside Serve (`deployments/replica/pod.py`); None: no files."""
    heartbeat_s: float = Field(default=0.05, gt=0, le=1)
    """Longest silence of a replica on the wire, in seconds, while it has requests. Without any it speaks five
    times a second, or five times in `lost_after_s`."""
    status_timeout_s: float = Field(default=3.0, gt=0)
    """Seconds that an ingress waits for Ray or Serve to report their state; then it continues without."""
    lost_after_s: float = Field(default=3.0, gt=0)
    """Seconds of silence on the wire after which an ingress moves a replica's streams to another."""
    max_retries: int = Field(default=2, ge=0)
    """Most replicas that a request may lose before its first token; then it fails."""
    max_migrations: int = Field(default=3, ge=0)
    """Most replicas that a stream may lose after its first token; then it ends with an error."""
    migration_wait_s: float = Field(default=30.0, ge=0)
    """Seconds that a request which lost its replica waits for room at another one; before that, as long at most
    for its turn to run where no other request does that may have ended its replica. As long at most, a new ingress
    waits for engines before it listens where others do."""
    max_lost_replicas_per_request: int = Field(default=1, ge=1)
    """Replicas that may die under one request, one after another, after the first that did; one more where the
    last of them vanished without an error. If the request was the only suspect there, it fails then."""
    hedge_after_s: float | None = Field(default=None, gt=0)
    """Seconds without a first token after which a second replica is asked too; None: never."""
    hedge_share: float = Field(default=0.05, ge=0, le=1)
    """Largest share of all requests that may be sent to a second replica."""


class DrainSettings(Section):
    """How an engine replica learns that its machine is about to end, and leaves before it does; see
    docs/termination.md."""

    notice: Annotated[str, AfterValidator(_known_notice)] | None = None
    """Where replicas look for notices: "aws", "gcp" or "azure", the metadata service of that cloud; a URL; or the
    absolute path of a file that appears, which a preStop hook can make. None: nowhere."""
    grace_s: float = Field(default=30.0, gt=0)
    """Seconds from a notice that names no time to the end of the machine, or of the pod."""
    leave_s: float = Field(default=120.0, gt=0)
    """Seconds before the end from which the replica takes no new requests and hands over what it has."""
    poll_s: float = Field(default=1.0, ge=0.1)
    """Seconds between two looks."""


class StreamSettings(Section):
    """Which streams can be continued, and how long they outlive their readers: see docs/streams.md."""

    ids: Literal["asked", "always"] = "asked"
    """Which streams have event ids, by which they can be continued: those of clients that ask, or all."""
    detached_s: float = Field(default=10.0, ge=0)
    """Seconds for which a stream is generated further after its last reader has left."""
    max_detached_s: float = Field(default=600.0, ge=0)
    """Longest such time that a request may ask for (`x-raydix-detached-s`), and that of responses in the
    background."""
    keep_s: float = Field(default=60.0, ge=0)
    """Seconds for which a replica keeps a stream that has ended, or has no reader, to be read again."""
    max_kept: int = Field(default=256, ge=0)
    """Most streams without a reader that a replica keeps for each tenant, including those that it still generates;
    the oldest are forgotten first."""
    max_kept_bytes: int = Field(default=64 * 2**20, ge=0)
    """Most bytes of such streams for each tenant, with their requests."""
    max_record_bytes: int = Field(default=2**18, ge=0)
    """Largest request that is kept with its stream. After a larger one, a client has to send the request again
    to continue."""


class WireSettings(Section):
    """The connections between ingresses and engine replicas: see `deployments/wire/handshake.py`."""

    encrypt: bool = True
    """Whether they are encrypted (CURVE). Without it, ingresses show their key in clear."""
    handshake_s: float = Field(default=10.0, gt=0)
    """Seconds in which a new connection must prove to be an ingress's, or is closed."""
    ports: tuple[int, int] | None = None
    """Lowest and highest TCP port; each replica takes the first free one of its node. None: any free port.
    Firewalls and NetworkPolicies need a range."""

    @model_validator(mode="after")
    def _ports_are_a_range(self) -> Self:
        if self.ports is not None and not 1024 <= self.ports[0] <= self.ports[1] <= 65535:
            low, high = self.ports
            raise ValueError(f"ports must be [lowest, highest] from 1024 to 65535, got [{low}, {high}]")
        return self


class LogSettings(Section):
    """Log lines of ingresses and engines, through Ray Serve's logger; see
    `deployments/telemetry/request_log.py`."""

    encoding: Literal["text", "json"] | None = None
    """Format of the log files; "json" writes one object per line. None: as Serve's own `logging_config` says."""
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged. Failed requests are logged as WARNING, all others as INFO."""
    directory: str | None = None
    """Directory of the log files; None: `logs/serve` in Ray's session directory."""
    requests: bool = True
    """Whether each generation request is logged when it has ended."""
    access_log: str | None = None
    """File or pipe to which ingresses append a line for each answered request, as `raydix serve` shows it: method,
    path, status, tokens, milliseconds, and what was wrong. None: no lines."""


class TracingSettings(Section):
    """OpenTelemetry traces of requests; see `deployments/telemetry/spans.py`. Needs the extra `tracing`.

    Headers, certificates and compression come from the OTEL_EXPORTER_OTLP_* variables of the ingress's process.
    """

    otlp_endpoint: str | None = None
    """URL of an OTLP/HTTP collector; /v1/traces is appended where it has no path. None: no traces."""
    service_name: str = "raydix"
    """Name of this service in traces."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of requests that are traced; a request with a `traceparent` header follows its caller's decision."""
    max_waiting_spans: int = Field(default=8192, ge=1)
    """Most finished spans that wait for the collector, about 2 kB each; beyond it the oldest are dropped."""
    export_period_s: float = Field(default=2.0, gt=0)
    """Seconds between exports."""
    export_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds that an export may take with its retries; a stopping ingress waits as long for the last one."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_url(cls, given: str | None) -> str | None:
        if given is None:
            return None
        url = urlsplit(given)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"otlp_endpoint must be a URL such as http://collector:4318, got {given!r}")
        return given if url.path.strip("/") else f"{given.rstrip('/')}/v1/traces"


class ChatSettings(Section):
    """Contents of a model's answers besides text; see `deployments/api/dialects/dialect.py`."""

    tools: Literal[
        "auto", "hermes", "harmony", "gemma4", "seed_oss", "qwen3_coder", "minimax", "glm47", "glm", "kimi",
        "deepseek_v3", "deepseek_v31", "granite", "phi4", "mistral_list", "mistral", "llama3", "olmo3",
        "pythonic", "none",
    ] = "auto"  # fmt: skip
    """Format of the model's tool calls; "auto" reads it off the chat template, "none" refuses tools."""
    reasoning: Literal["auto", "think", "none"] = "auto"
    """Whether a <think>...</think> section that begins an answer is returned separately; "auto" decides by the
    chat template and the vocabulary."""
    template_timeout_s: float = Field(default=10.0, gt=0)
    """Most seconds of processor time in which a conversation is rendered by the model's chat template."""
    max_rendered_chars: int = Field(default=32 * 2**20, ge=1024)
    """Most characters of a rendered conversation, and of each value that the chat template makes for it; an entry
    of an array or object counts as 32 more."""
    late_system: Literal["auto", "keep", "merge"] = "auto"
    """Treatment of system messages that are not the first: kept in their places, or merged into the first; "auto"
    merges them where the template would refuse or omit them."""


class DeploymentSettings(Section):
    """How many replicas a deployment has, and what each reserves."""

    count: int = Field(default=1, ge=1)
    """Number of replicas."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs that each replica reserves in Ray."""
    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs that each replica reserves in Ray; None: 1 for an engine on "cuda", otherwise 0. Where an engine has
    several ranks (`engine.tensor_parallel_size`, `engine.pipeline_parallel_size`), each rank reserves this many,
    and as many CPUs and resources."""
    resources: dict[str, float] = Field(default={})
    """Custom Ray resources that each replica reserves."""
    max_ongoing: int = Field(default=4096, ge=1)
    """Most concurrent requests per replica; an engine's own bounds are `engine.max_waiting` and `max_running`."""
    max_queued: int = Field(default=1024, ge=-1)
    """Most requests that wait for a replica in each caller; more are refused. -1: no bound."""
    drain_timeout_s: float = Field(default=120.0, ge=0)
    """Seconds that the streams of a stopping replica may take to end."""
    surge_percent: Surge | Literal["auto"] = "auto"
    """Replicas that a change of `args` starts before it stops old ones, in percent of their number and rounded up.
    "auto": 20 where a node has room for one more when the change comes, else 0."""

    def reserved(self, num_gpus: float) -> dict[str, float]:
        """Return Ray's resources of a replica with so many GPUs, or of each of its ranks."""
        all_of_them = {"CPU": self.num_cpus, "GPU": num_gpus, **self.resources}
        return {name: amount for name, amount in all_of_them.items() if amount}


class AdmissionSettings(Section):
    """When requests wait in the ingress instead of at an engine, and how long (`deployments/admission/`).

    Here tenants take turns; at an engine, `engine.policy` decides. Bounds are per ingress.
    """

    ttft_target_s: float = Field(default=0.15, gt=0)
    """Seconds of work queued at the least busy engine above which requests wait here. One tenant's flood adds
    about as much to another's time to first token. Below a few step times, engines run out of work."""
    max_wait_s: float = Field(default=30.0, gt=0)
    """Longest wait, in seconds, also while no engine is up; a request may ask for less. One that would wait longer
    is refused."""
    quantum_tokens: int = Field(default=2048, ge=1)
    """Uncached prompt tokens that the tenant with the lowest weight may send on each of its turns."""
    max_waiting: int = Field(default=4096, ge=1)
    """Most waiting requests of all tenants together."""
    max_waiting_tokens: int = Field(default=16_000_000, ge=1)
    """Most uncached prompt tokens that wait, of all tenants together."""
    max_waiting_per_tenant: int = Field(default=1024, ge=1)
    """Most waiting requests of one tenant."""
    max_waiting_tokens_per_tenant: int = Field(default=4_000_000, ge=1)
    """Most uncached prompt tokens of one tenant that wait; a single request may have more."""


class EngineDeploymentSettings(DeploymentSettings):
    """Engine replicas: a fixed `count`, or as many as the work needs (`autoscaling`)."""

    autoscaling: AutoscalingSettings | None = None
    """Scales the number of replicas; given instead of `count`."""
    placement: Placement = "stages"
    """With `engine.pipeline_parallel_size`: "pack" puts all stages of a replica on one machine, "stages" each on
    one machine and as many together as fit, "spread" each on a machine of its own."""
    kv_events: KvEventSettings | None = None
    """Where replicas publish the blocks that they hold, for other routers. None: nowhere."""
    kv_fetch: KvFetchSettings | None = KvFetchSettings()
    """How replicas fetch KV from each other, where they have `engine.host_kv_gib`. None: they fetch none."""
    roles: RoleSettings | None = None
    """Which replicas compute prompts and which generate; given instead of `count`. None: all do both."""

    @model_validator(mode="before")
    @classmethod
    def _roles_say_how_many(cls, given: Any) -> Any:
        """Count the replicas of all roles. pydantic refuses values that are no sections."""
        roles = given.get("roles") if isinstance(given, dict) else None
        if not roles:
            return given
        try:
            settings = RoleSettings.model_validate(roles)
        except ValidationError:  # which is reported again, with the whole path
            return given
        if given.get("autoscaling") is not None:
            raise ValueError(
                "roles and autoscaling cannot be combined, because each role scales by its own work: give bounds "
                "under roles, as in roles: {prefill: {min: 1, max: 4}, decode: 2}, and remove autoscaling"
            )
        if given.get("count", settings.count) != settings.count:
            sizes = " and ".join(f"{pool.least} for {pool.role}" for pool in settings.pools)
            raise ValueError(f"count is {given['count']}, but roles has {sizes}: leave out count")
        return {**given, "roles": settings, "count": settings.count}

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The replicas of each deployment that these settings describe."""
        return (Pool(None, self.autoscaling or self.count),) if self.roles is None else self.roles.pools

    @property
    def num_expected(self) -> int:
        """Least number of replicas that are up when all is well."""
        return sum(pool.least for pool in self.pools)

    @model_validator(mode="after")
    def _count_or_autoscaling(self) -> Self:
        if self.autoscaling is not None and "count" in self.model_fields_set:
            raise ValueError(
                f"count ({self.count}) and autoscaling (min {self.autoscaling.min}, max {self.autoscaling.max}) "
                "cannot be combined: leave out count to scale with the work, or autoscaling to fix the number"
            )
        return self


class IngressSettings(DeploymentSettings):
    """Ingress replicas, and how clients reach them."""

    max_ongoing: int = Field(default=1000, ge=1)
    """Most open requests of an ingress whose bodies have arrived, streams included. More get a 429, or wait in
    Serve's proxy. Each tenant, or each address on an open server, may have as many whose bodies are arriving."""
    http: Literal["direct", "serve"] = "direct"
    """"direct": clients connect to an ingress; the ingresses of one machine share the port. "serve": they connect
    to Serve's HTTP proxy, at its `http_options`; only `allowed_hosts` and `cors_origins` of the settings below
    have an effect."""
    host: str = "127.0.0.1"
    """Address on which ingresses listen; 0.0.0.0 to be reached from other machines."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port on which ingresses listen."""
    allowed_hosts: tuple[Annotated[str, AfterValidator(check_host)], ...] | None = None
    """Names and addresses under which clients may reach the API: what the Host header may have, without its port.
    "*.example.com" is every name below that one, "10.0.0.0/8" a network, "*" any host. None: this machine's own
    (localhost, 127.0.0.1, ::1) where `host` is one of them, otherwise any."""
    surge_percent: Surge | Literal["auto"] = 100
    """Ingresses that a change of `args` starts before it stops old ones, in percent of their number, rounded up:
    the port is never without one. They need the CPUs of as many more."""
    cors_origins: tuple[Annotated[str, AfterValidator(check_origin)], ...] = ()
    """Sites whose pages may use the API from a browser, such as "https://app.example.com"; "*": all sites."""
    keep_alive_s: int = Field(default=75, ge=1)
    """Seconds after which an idle connection is closed."""
    header_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds in which the headers of a request must have arrived."""
    shutdown_delay_s: float = Field(default=0.0, ge=0)
    """Seconds for which a stopped ingress still takes requests, while its /ready says that it is not ready: longer
    than a load balancer needs to notice."""

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Hosts that requests may name; None: any."""
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        return LOCAL_HOSTS if self.http == "direct" and is_local(self.host) else None


class SloSettings(Section):
    """Service-level targets: `raydix_slo_requests_total` counts the requests that met each of them."""

    ttft_s: float = Field(default=1.0, gt=0)
    """Target for the time to first token, in seconds; applies to every request that got one."""
    itl_s: float = Field(default=0.1, gt=0)
    """Target for a request's mean inter-token latency, in seconds; applies to requests of at least two tokens."""
    e2e_s: float = Field(default=30.0, gt=0)
    """Target for the time to the end, in seconds; applies to requests that were answered in full."""


class MetricsSettings(Section):
    """Where the metrics can be read besides /metrics, and under which other names."""

    port: int | None = Field(default=None, ge=1, le=65535)
    """Port on which the hub itself serves /metrics on its node; None: it serves none."""
    host: str = "127.0.0.1"
    """Address that the hub listens on. This port needs no key: every client that reaches it can read the
    metrics."""
    port_wait_s: float = Field(default=30.0, ge=0)
    """Seconds for which a new hub waits for that port: the one before it may still hold it. Then it fails."""
    inference_gateway: bool = False
    """Whether the page has the gauges that Kubernetes' inference gateway reads, under their vllm: names; promtool
    complains about the colon."""
    ray: bool = False
    """Whether every process also reports to Ray's own metrics, as ray_raydix_*; see `monitoring/ray_mirror.py`."""


class ResponseSettings(Section):
    """Storage of the Responses API's answers, and how many run in the background."""

    store: str = "memory"
    """Where they are kept: "memory", that of each ingress, or a store that all ingresses share, as a URL: a
    directory "file:///path", or a Redis "redis://host:port/number" ("rediss" with TLS; needs the extra
    `redis`)."""
    max_bytes: int = Field(default=128 * 2**20, ge=0)
    """Bytes of stored responses, with their inputs, that an ingress keeps in memory, or that a directory has; 0
    keeps none. When full, it deletes the least recently used response of the tenant with the most."""
    ttl_s: float = Field(default=86_400.0, gt=0)
    """Seconds after which a response is forgotten that was neither read nor continued."""
    max_background: int = Field(default=64, ge=0)
    """Most responses that an ingress generates in the background; more get a 429."""

    @property
    def directory(self) -> Path | None:
        """The directory of responses; None: they are kept elsewhere."""
        url = urlsplit(self.store)
        return Path(unquote(url.path)) if url.scheme == "file" else None

    @property
    def is_redis(self) -> bool:
        """Whether responses are kept in Redis."""
        return urlsplit(self.store).scheme in ("redis", "rediss")

    @field_validator("store")
    @classmethod
    def _is_known(cls, given: str) -> str:
        url = urlsplit(given)
        is_path = url.scheme == "file" and not url.netloc and url.path.startswith("/")
        is_host = url.scheme in ("redis", "rediss") and bool(url.hostname)
        if given != "memory" and not is_path and not is_host:  # the given URL may contain a password
            raise ValueError(
                'store must be "memory" or a URL such as file:///var/lib/raydix or redis://host:6379/0'
            )
        return given


class BatchSettings(Section):
    """How the requests of a batch are sent (`deployments/batch/runner.py`, `deployments/ingress/many.py`)."""

    max_in_flight: int = Field(default=256, ge=1)
    """Most requests of one batch in flight. Fewer are, while the engines or a tenant's limits refuse more."""
    max_attempts: int = Field(default=5, ge=1)
    """Attempts to run a request before its error becomes its answer."""
    patience_s: float = Field(default=600.0, gt=0)
    """Seconds after which a batch stops when all its requests are refused and none is in flight."""
    priority: int = 10
    """Priority of requests that give none, among those of batches; all of them are behind interactive ones."""


class WarmUpSettings(Section):
    """Prompts that a new engine replica computes before it takes requests; see
    `deployments/replica/warm_up.py`."""

    max_seconds: float = Field(default=30.0, ge=0)
    """Seconds that warm-up may take; 0: replicas start with an empty cache."""
    max_kv_share: float = Field(default=0.5, gt=0, le=1)
    """Largest share of the replica's KV pages that warm-up may fill."""
    ask_timeout_s: float = Field(default=3.0, gt=0)
    """Seconds that the replica waits for the prefixes to compute; then it starts with an empty cache."""
    half_life_s: float = Field(default=600.0, gt=0)
    """Seconds after which the use of a prefix counts half."""
    track_tokens: int = Field(default=4_000_000, ge=1024)
    """Most tokens of prompts' beginnings that each ingress tracks: 0.5 bytes each, and 4 more where shared."""
    max_tokens: int = Field(default=250_000, ge=1)
    """Most tokens of prefixes in an ingress's report to the hub, 4 bytes each."""
    tell_period_s: float = Field(default=5.0, gt=0)
    """Seconds between two such reports."""
