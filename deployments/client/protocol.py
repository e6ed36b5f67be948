"""The seam between the HTTP API and the engines: what the API asks for, what it gets, and how it is refused.

    API ── GenerateRequest ──▶ EngineClient.generate() ──▶ Generation: delta, delta, ..., delta with finish_reason
                                      └──▶ Overloaded (429) | Unavailable (503) | Rejected (400)

Knows neither Ray nor ZeroMQ, so the API is tested with a scripted client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from deployments.client.timeline import Timeline
from engine.sampling_params import SamplingParams
from engine.stream_delta import FinishReason, StreamDelta


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue. Everything an engine needs, and nothing of HTTP."""

    request_id: str
    """Unique in the application; several of them where one HTTP request asks for several choices."""
    model: str
    """The model's name in the API."""
    prompt_ids: list[int]
    sampling: SamplingParams
    """`seed` is always set, so that a stream resumed elsewhere goes on as it would have."""
    output_ids: list[int] = field(default_factory=list)
    """What was already generated for it elsewhere."""
    num_prompt_reported: int = 0
    """Leading prompt tokens whose log-probabilities were received already, if they were asked for."""
    priority: int = 0
    """Higher goes first and is preempted last."""
    salt: str = ""
    """Prefixes are shared only among requests with the same salt."""
    session_id: str | None = None
    """A hint that requests belong together; never needed for correctness."""
    tenant: str = ""
    """Who asks."""
    x_request_id: str = ""
    """The id that its client knows it by, for logs: not unique."""
    max_wait_s: float | None = None
    """Longest wait for an engine that it can use, in seconds; None: the service's own limit."""
    block_hashes: Sequence[int] | None = None
    """Prefix hashes of the blocks of `prompt_ids` and `output_ids`, as `router.placer.Placer` makes them; None:
    they were not computed yet."""

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose KV may come from a cache: not those that are still to be scored."""
        if self.sampling.prompt_logprobs is not None and self.num_prompt_reported < len(self.prompt_ids):
            return self.num_prompt_reported
        return len(self.prompt_ids) + len(self.output_ids)


OverloadKind = Literal["queue_full", "tenant_queue_full", "deadline"]
"""Every queue that could take the request is full; its tenant has too much waiting; it would wait too long."""


class Overloaded(Exception):
    """There is too much to do. HTTP 429, or 503 for a request that would wait too long; with Retry-After."""

    def __init__(self, reason: str, retry_after_s: float, kind: OverloadKind = "queue_full") -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.kind = kind


class Unavailable(Exception):
    """No engine can take the request now: none is up, or the service drains. HTTP 503."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Rejected(Exception):
    """The request can never be served as it is. HTTP 400; `param` names the field at fault, if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ReplicaLost(Exception):
    """The stream's engine replica was lost after its first token, and no other could take the stream over."""

    def __init__(self, replica: str, reason: str) -> None:
        super().__init__(f"engine replica {replica} was lost: {reason}")
        self.replica = replica
        self.reason = reason


RefusalKind = Literal["never_fits", "queue_full", "stopped", "draining"]


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What a replica answers to the call that brought it a request: how the request ended, or why it was refused.

    A refusal is an ordinary answer and no exception: Serve would log a traceback for each.
    """

    replica: str
    finish_reason: FinishReason | None = None
    refusal: RefusalKind | None = None
    reason: str = ""
    """Why the request was refused."""
    retry_after_s: float = 1.0
    """When to come back to a full queue."""


class Generation(Protocol):
    """The stream of one request.

    A prompt's log-probabilities come before the first token. A slow reader gets merged deltas. The last delta has
    a `finish_reason`; iteration ends after it. When its replica is lost the stream goes on at another one,
    unnoticed but for a pause; raises `ReplicaLost` when that was tried often enough.
    """

    @property
    def replica(self) -> str | None:
        """Id of the replica that generates the stream; None until it is known."""
        ...

    @property
    def timeline(self) -> Timeline:
        """Where the stream was so far, when, and what engines said of it."""
        ...

    def explain(self) -> dict[str, Any] | None:
        """Why it runs where it runs: the router's record of its last placement (`router.decisions`), if kept."""
        ...

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        """Iterate over the deltas, once."""
        ...

    async def __anext__(self) -> StreamDelta:
        """Wait for what the stream gained since the last call, as one delta."""
        ...

    async def aclose(self) -> None:
        """Abort in the engine when not finished: its pages are free within one step. Idempotent."""
        ...


class Turn(Protocol):
    """A request that may be sent. `sent` is called, and `refused` or, later, `began`."""

    @property
    def request(self) -> GenerateRequest:
        """The request to send: its priority may be the operator's."""
        ...

    @property
    def asked_at(self) -> float:
        """Clock (`time.monotonic`) when it was asked for."""
        ...

    @property
    def sent_at(self) -> float:
        """Clock when it no longer waited."""
        ...

    def sent(self) -> None:
        """An engine accepted or refused it, or the client left: it is no longer on its way."""
        ...

    def refused(self) -> None:
        """No engine took it."""
        ...

    def began(self, delta: StreamDelta) -> None:
        """Its first token came, or its end: how much of its prompt was computed is known."""
        ...


class AdmissionControl(Protocol):
    """Decides when a request may be sent to an engine."""

    async def admit(self, request: GenerateRequest) -> Turn:
        """Return when the request may be sent. Raises `Overloaded` after, or instead of, too long a wait."""
        ...


HealthState = Literal["healthy", "degraded", "unhealthy", "draining", "unloaded"]


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """One engine replica as this ingress sees it."""

    replica: str
    is_connected: bool
    """Whether its heartbeats arrive."""
    heartbeat_age_s: float | None
    """Seconds since its last message; None before the first."""
    num_running: int = 0
    num_waiting: int = 0
    waiting_prefill_tokens: int = 0
    kv_pages_free: int = 0
    kv_pages_total: int = 0
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class FleetHealth:
    """All engine replicas: "healthy" when as many are up as configured, "degraded" when some are."""

    state: HealthState
    num_expected: int
    replicas: tuple[ReplicaHealth, ...] = ()

    @property
    def num_up(self) -> int:
        """Replicas that take requests."""
        return sum(replica.is_connected and not replica.is_draining for replica in self.replicas)


class Engines(Protocol):
    """A model's engines. They take what is sent to them; when that is, is for `AdmissionControl` to say."""

    def prepared(self, request: GenerateRequest) -> GenerateRequest:
        """The request with what routing has to know of its prompt: computed once, and carried along."""
        ...

    async def generate(self, request: GenerateRequest, turn: Turn | None = None) -> Generation:
        """As `EngineClient.generate`; `turn` hears when the stream begins."""
        ...

    async def health(self) -> FleetHealth:
        """How the engines are, from local knowledge: never waits for one of them."""
        ...

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The last placements (`router.decisions`), newest first."""
        ...


class EngineClient(Protocol):
    """Generates with the engine that is best placed, when it is the request's turn."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return once an engine accepted; raise `Overloaded`, `Unavailable` or `Rejected` when none did."""
        ...

    async def health(self) -> FleetHealth:
        """How the engines are, from local knowledge: never waits for one of them."""
        ...

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The last placements (`router.decisions`), newest first."""
        ...


ModelState = Literal["loaded", "loading", "unloaded", "draining"]
UNLOADED_STATES: tuple[ModelState, ...] = ("unloaded", "draining")
"""States of a model that takes no requests until it is loaded."""


class NotSwitchable(Exception):
    """The model cannot be loaded or unloaded as the application is deployed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ModelSwitch(Protocol):
    """Loads and unloads a model. Orders are noted when the call returns, and carried out after it."""

    async def state(self) -> ModelState | None:
        """The state; None when it cannot be found out in time."""
        ...

    async def load(self) -> ModelState:
        """Have engines: idempotent. Raises `NotSwitchable` or `Unavailable`."""
        ...

    async def unload(self) -> ModelState:
        """Have none: idempotent; streams that run may end. Raises `NotSwitchable` or `Unavailable`."""
        ...
