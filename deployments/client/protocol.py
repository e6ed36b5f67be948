"""The interface between the HTTP API and the engines: requests, streams of deltas, and refusals.

    API ── GenerateRequest ──▶ EngineClient.generate() ──▶ Generation: delta, delta, ..., delta with finish_reason
                                      └──▶ Overloaded (429) | Unavailable (503) | Rejected (400)

This module knows neither Ray nor ZeroMQ, so the API is tested with a scripted client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct

from deployments.client.timeline import Timeline
from deployments.wire.messages import RefusalKind, ResumableStream, StreamPart
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta


class GenerateRequest(Struct, frozen=True):
    """One prompt to continue, with everything that an engine needs and nothing of HTTP."""

    request_id: str
    """Unique in the application. An HTTP request for several choices becomes several engine requests."""
    model: str
    """The model's name in the API."""
    prompt_ids: list[int]
    sampling: SamplingParams
    """`seed` is always set, so that a stream that is resumed elsewhere continues with the same tokens."""
    output_ids: list[int] = []
    """Tokens that another replica has already generated."""
    num_prompt_reported: int = 0
    """Number of leading prompt tokens whose log-probabilities were already received, if requested."""
    priority: int = 0
    """A request with a lower priority runs first and is preempted last."""
    salt: str = ""
    """Prefixes are shared only among requests with the same salt."""
    session_id: str | None = None
    """Hint that requests belong together; never needed for correctness."""
    tenant: str = ""
    """Name of the tenant that sent the request."""
    address: str = ""
    """The client's address where there are no tenants; addresses then share the engines as tenants do."""
    is_deferrable: bool = False
    """Whether it yields to every request that is not deferrable; the requests of a batch do."""
    max_wait_s: float | None = None
    """Longest wait for an engine that is useful to the client, in seconds; None for the service's own limit."""
    block_hashes: Sequence[int] | None = None
    """Prefix hashes of the blocks of `prompt_ids` and `output_ids`, as `router.placer.Placer` computes them;
    None before that."""
    stream: ResumableStream | None = None
    """Set where the stream outlives this process and its client's connection."""

    @property
    def sharer(self) -> str:
        """The party that shares the engines with others: a tenant, or an address where there are no tenants."""
        return f"{self.tenant}@{self.address}" if self.address else self.tenant

    @property
    def num_reusable(self) -> int:
        """Number of leading tokens whose KV may come from a cache, which excludes those still to be scored."""
        if self.sampling.prompt_logprobs is not None and self.num_prompt_reported < len(self.prompt_ids):
            return self.num_prompt_reported
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_stream(self) -> bool:
        """Whether its tokens come in order, so that another replica can resume it after any of them."""
        sampling = self.sampling
        return sampling.max_tokens > 1 and sampling.pooling is None and sampling.beams is None


OverloadKind = Literal["queue_full", "tenant_queue_full", "deadline"]
"""Every queue that could accept the request is full; its tenant has too much waiting; it would wait too long."""


class Overloaded(Exception):
    """The service is overloaded. HTTP 429, or 503 for a request that would wait too long; with Retry-After."""

    def __init__(self, reason: str, retry_after_s: float, kind: OverloadKind = "queue_full") -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.kind = kind


class Unavailable(Exception):
    """No engine can accept the request now: none is up, or the service is draining. HTTP 503."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Rejected(Exception):
    """The request as it is can never be served. HTTP 400; `param` names the field at fault, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ReplicaLost(Exception):
    """The stream's engine replica was lost after its first token, and no other could resume the stream."""

    def __init__(self, replica: str, reason: str) -> None:
        super().__init__(f"engine replica {replica} was lost: {reason}")
        self.replica = replica
        self.reason = reason


class FailsSteps(Exception):
    """The steps of healthy engines failed with this request, so no other engine receives it. HTTP 500."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(f"{num_steps} steps of engines failed with this request")
        self.num_steps = num_steps


class EndsEngines(Exception):
    """The request ended the engines that computed it, so no other engine receives it. HTTP 500."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(f"{num_replicas} engine replicas died while they computed this request")
        self.num_replicas = num_replicas


class TakenOver(Exception):
    """Another reader continues the stream, so this one ends."""


class DeliveryFailed(Exception):
    """A defect of Raydix ended the stream; the log has its traceback. HTTP 500."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """A replica's answer to a call through Serve: the request's whole output, or why it was refused.

    A refusal is not an exception, because Serve would log a traceback for each.
    """

    replica: str
    output: StreamDelta | None = None
    """None if the request was refused."""
    refusal: RefusalKind | None = None
    reason: str = ""
    """Why the request was refused."""
    retry_after_s: float = 1.0
    """Seconds after which a retry is worthwhile when the queue was full."""


class Generation(Protocol):
    """The stream of one request.

    A prompt's log-probabilities come before the first token. A slow reader receives merged deltas. The last delta
    has a `finish_reason`; iteration ends after it. When its replica is lost, the stream continues at another one
    after a pause; raises `ReplicaLost` when the limit of migrations is reached.
    """

    @property
    def replica(self) -> str | None:
        """Id of the replica that generates the stream; None until it is known."""
        ...

    @property
    def timeline(self) -> Timeline:
        """Replicas that have run the stream so far, with times and the engines' own timings."""
        ...

    def explain(self) -> dict[str, Any] | None:
        """Return the router's record of the last placement (`router.decisions`), if it is still kept."""
        ...

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        """Iterate over the deltas, once."""
        ...

    async def __anext__(self) -> StreamDelta:
        """Return the output since the last call as one delta; wait if there is none."""
        ...

    async def aclose(self) -> None:
        """Abort the request in the engine unless it has finished; frees its pages within one step. Idempotent."""
        ...

    async def detach(self) -> None:
        """Stop reading. A resumable stream is generated further, for a while; any other one is aborted."""
        ...


@dataclass(frozen=True, slots=True)
class FoundPart:
    """One request of a stream, at the replica that has its tokens."""

    replica: str
    part: StreamPart


@dataclass(frozen=True, slots=True)
class FoundStream:
    """A stream that replicas generate, or have generated and still keep."""

    record: bytes
    """The client's request as the API packed it; empty where it was too large to be kept."""
    parts: Mapping[int, FoundPart]
    """Its requests by their index. Those that no replica knows are omitted."""


class Turn(Protocol):
    """Permission to send a request. The caller calls `sent`, and either `refused` or, later, `began`."""

    @property
    def request(self) -> GenerateRequest:
        """The request to send, whose priority may be the operator's."""
        ...

    @property
    def asked_at(self) -> float:
        """Clock (`time.monotonic`) when admission was requested."""
        ...

    @property
    def sent_at(self) -> float:
        """Clock when the wait ended."""
        ...

    def sent(self) -> None:
        """Report that the request counts at an engine now, or will not be sent. Idempotent."""
        ...

    def refused(self) -> None:
        """Report that no engine accepted the request."""
        ...

    def began(self, delta: StreamDelta) -> None:
        """Report the first token (or the end), which shows how much of the prompt was computed."""
        ...


class AdmissionControl(Protocol):
    """Decides when a request may be sent to an engine."""

    async def admit(self, request: GenerateRequest) -> Turn:
        """Wait until the request may be sent. Raises `Overloaded` after, or instead of, too long a wait."""
        ...


HealthState = Literal["healthy", "degraded", "unhealthy", "draining", "unloaded"]


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """One engine replica as this ingress sees it."""

    replica: str
    is_connected: bool
    """Whether the replica's heartbeats arrive."""
    heartbeat_age_s: float | None
    """Seconds since its last message; None before the first."""
    num_running: int = 0
    num_waiting: int = 0
    waiting_prefill_tokens: int = 0
    kv_pages_free: int = 0
    kv_pages_total: int = 0
    is_draining: bool = False
    failing: str | None = None
    """Why its engine computes nothing now: its steps fail for lack of "memory", because its "device" is lost or
    for "other" reasons, or it has "ended"; None while it is healthy."""


@dataclass(frozen=True, slots=True)
class FleetHealth:
    """All engine replicas: "healthy" when as many are up as configured, "degraded" when only some are."""

    state: HealthState
    num_expected: int
    replicas: tuple[ReplicaHealth, ...] = ()

    @property
    def num_up(self) -> int:
        """Number of replicas that accept requests."""
        return sum(r.is_connected and not r.is_draining and r.failing is None for r in self.replicas)


class Engines(Protocol):
    """A model's engines. `AdmissionControl` decides when a request is sent to them."""

    def prepared(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with its block hashes, which routing needs and which are computed only once."""
        ...

    async def generate(self, request: GenerateRequest, turn: Turn | None = None) -> Generation:
        """Do the same as `EngineClient.generate`, and report to `turn` when the stream begins."""
        ...

    async def find(self, name: str, tenant: str) -> FoundStream | None:
        """Do the same as `EngineClient.find`."""
        ...

    async def adopt(self, request: GenerateRequest, found: FoundPart) -> Generation:
        """Do the same as `EngineClient.adopt`."""
        ...

    async def health(self) -> FleetHealth:
        """Return the engines' health from local knowledge, without waiting for any of them."""
        ...

    @property
    def are_awaited(self) -> bool:
        """Whether no engine answers, and one is expected to: new requests wait for it."""
        ...

    def expect_none(self) -> None:
        """Note that the model is unloaded, so that no request waits for an engine until one has answered again."""
        ...

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """Return the last placements (`router.decisions`), newest first."""
        ...


class EngineClient(Protocol):
    """Generates with the engine that the router picks, when it is the request's turn."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return once an engine accepted; raise `Overloaded`, `Unavailable` or `Rejected` when none did."""
        ...

    async def find(self, name: str, tenant: str) -> FoundStream | None:
        """Return a tenant's resumable stream from the replicas that have it; None if none that answers has it."""
        ...

    async def adopt(self, request: GenerateRequest, found: FoundPart) -> Generation:
        """Continue to read a request's stream, from its first token. A former reader gets `TakenOver`.

        It waits for no turn, because it runs already. If its replica is lost, it continues at another one.
        """
        ...

    async def health(self) -> FleetHealth:
        """Return the engines' health from local knowledge, without waiting for any of them."""
        ...

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """Return the last placements (`router.decisions`), newest first."""
        ...


ModelState = Literal["loaded", "loading", "unloaded", "draining"]
UNLOADED_STATES: tuple[ModelState, ...] = ("unloaded", "draining")
"""States of a model that accepts no requests until it is loaded."""


class NotSwitchable(Exception):
    """The model cannot be loaded or unloaded as the application is deployed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


RolloutStage = Literal["waiting", "running", "paused", "done", "rolled_back", "aborted"]
"""The stage of a new version's rollout (`deployments/hub/rollouts.py`)."""
ROLLOUT_STAGES: Sequence[RolloutStage] = ("waiting", "running", "paused", "done", "rolled_back", "aborted")
RolloutAction = Literal["pause", "resume", "abort"]


class RolloutRefused(Exception):
    """A rollout is in a stage in which an operator's order is not possible."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RolloutControl(Protocol):
    """Reports and controls rollouts. Its calls raise `Unavailable` while the hub does not answer."""

    async def report(self) -> list[dict[str, Any]]:
        """Return each model that has versions, with their weights and its rollout."""
        ...

    async def control(self, model: str, action: RolloutAction) -> dict[str, Any] | None:
        """Give an order; return the model's report, or None if it has no rollout. Raises RolloutRefused."""
        ...


class ModelSwitch(Protocol):
    """Loads and unloads a model. An order is recorded when its call returns, and carried out later."""

    async def state(self) -> ModelState | None:
        """Return the state; None when it cannot be determined in time."""
        ...

    async def load(self) -> ModelState:
        """Order a load. Idempotent. Raises `NotSwitchable` or `Unavailable`."""
        ...

    async def unload(self) -> ModelState:
        """Order an unload; running streams may finish. Idempotent. Raises `NotSwitchable` or `Unavailable`."""
        ...
