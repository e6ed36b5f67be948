"""Late binding: when every engine is busy, requests wait here, tenant by tenant, and not in an engine's queue.

    generate ── some engine has less than ttft_target_s queued, nobody waits ──▶ at once ───┐
       └── else ─▶ FairQueue ── an engine has room again ─▶ whose turn it is ───────────────┴─▶ EngineClient

An engine orders what it was given, by priority and arrival unless its policy is "fair", and no other engine takes
it over. So only about `ttft_target_s` of work is bound to engines, and the order of all the rest is decided at the
last moment. One tenant's flood then costs another at most that much, and a turn of each tenant that waits.

A request leaves the queue when it is bound, refused, or its client left; its place and its charge go with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from deployments.admission.busy_rate import BusyRate
from deployments.admission.fair_queue import FairQueue, QueueBounds, QueueFull, Waiting
from deployments.client.passed_on import PassedOn
from deployments.client.protocol import (
    EngineClient,
    FleetHealth,
    GenerateRequest,
    Generation,
    Overloaded,
    OverloadKind,
)
from deployments.client.timeline import Course
from deployments.config.settings import AdmissionSettings
from deployments.config.tenants import ANONYMOUS, Tenant
from engine.stream_delta import StreamDelta
from monitoring.metrics import Metrics

TICK_S = 0.01
"""Between looks at the engines while requests wait, in seconds: news of their load comes by itself."""
MIN_RETRY_S, MAX_RETRY_S = 1.0, 600.0


class LoadView(Protocol):
    """What this process knows of the engines, without asking them."""

    def queue_seconds(self, sending: Mapping[str, int]) -> float:
        """Seconds until the least busy engine would begin with a new prompt; 0 when no engine is up.

        `sending`: requests on their way from here that were not accepted yet, and their uncached tokens. The view
        spreads those over the engines that it does not count itself.
        """
        ...

    def uncached_tokens(self, request: GenerateRequest) -> int:
        """Tokens of its prompt that the engine it would go to has to compute."""
        ...


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a request waits for."""

    request_id: str
    comes: asyncio.Future[None]


class AdmissionClient:
    """An `EngineClient` in front of another. Lives on one event loop."""

    def __init__(
        self,
        client: EngineClient,
        load: LoadView,
        settings: AdmissionSettings,
        tenants: Mapping[str, Tenant],
        metrics: Metrics | None = None,
    ) -> None:
        """`tenants` by name; others weigh 1."""
        self._client, self._load, self._settings, self._tenants = client, load, settings, tenants
        self._metrics = metrics
        bounds = QueueBounds(
            settings.max_waiting,
            settings.max_waiting_tokens,
            settings.max_waiting_per_tenant,
            settings.max_waiting_tokens_per_tenant,
        )
        weights = {name: tenant.weight for name, tenant in tenants.items()}
        self._queue: FairQueue[_Turn] = FairQueue(weights, settings.quantum_tokens, bounds)
        self._sending: dict[str, int] = {}  # uncached tokens of requests let go that no engine has accepted yet
        self._drain = BusyRate()
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return once an engine accepted. Raises what the client raises, and Overloaded after (or instead of) a
        wait that is too long.
        """
        arrival, asked_at = _now(), time.monotonic()
        cost = max(1, self._load.uncached_tokens(request))
        turn = _Turn(request.request_id, asyncio.get_running_loop().create_future())
        entry = Waiting(turn, request.tenant, cost, request.priority)
        has_waited = bool(self._queue.num_waiting) or not self._has_room()
        if has_waited:
            await self._wait(entry, request)
        else:
            self._sending[request.request_id] = cost
        if self._metrics is not None:
            self._metrics.observe("tenant_queue_seconds", _now() - arrival, tenant=_label(request.tenant))
        wait = (asked_at, time.monotonic())
        return await self._send(entry, request, wait, is_charged=has_waited)

    async def health(self) -> FleetHealth:
        """How the engines are."""
        return await self._client.health()

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The last placements."""
        return self._client.decisions(limit)

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return self._queue.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Uncached prompt tokens of those."""
        return self._queue.num_tokens

    # --- waiting -------------------------------------------------------------------------------------------

    async def _wait(self, entry: Waiting[_Turn], request: GenerateRequest) -> None:
        """Until it is this request's turn: then its tokens are charged, and counted as being sent."""
        longest = self._settings.max_wait_s
        if request.max_wait_s is not None:
            longest = min(longest, request.max_wait_s)
        expected = self._expected_wait(entry)
        if expected > longest:
            reason = f"the wait for an engine is about {expected:.0f} s, and this request's limit is {longest:g} s"
            raise Overloaded(reason, self._retry_after(expected, longest), "deadline")
        try:
            self._queue.push(entry)
        except QueueFull as full:
            kind: OverloadKind = "tenant_queue_full" if full.whose == "tenant" else "queue_full"
            raise Overloaded(full.reason, self._retry_after(expected, longest), kind) from None
        self._note()
        self._let_go()
        try:
            await asyncio.wait((entry.item.comes,), timeout=longest)
        except asyncio.CancelledError:
            self._give_up(entry)
            raise
        if not entry.item.comes.done():
            retry_after_s = self._retry_after(self._expected_wait(entry), longest)
            self._give_up(entry)
            reason = f"no engine had room for this request within {longest:.3g} s"
            raise Overloaded(reason, retry_after_s, "deadline")

    def _give_up(self, entry: Waiting[_Turn]) -> None:
        """It leaves without having been sent, perhaps just after it was let go."""
        if entry.item.comes.done():
            self._sending.pop(entry.item.request_id, None)
            self._queue.charge(entry.tenant, -entry.cost)
        else:
            self._queue.remove(entry)
        self._note()
        self._let_go()

    def _let_go(self) -> None:
        """Send whoever's turn it is while an engine has room; look again soon while anybody waits."""
        while self._queue.num_waiting and self._has_room():
            entry = self._queue.pop()
            assert entry is not None
            self._drain.add(entry.cost, _now())
            self._sending[entry.item.request_id] = entry.cost
            entry.item.comes.set_result(None)
            self._note()
        if self._queue.num_waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._timer = None
        self._let_go()

    def _has_room(self) -> bool:
        return self._load.queue_seconds(self._sending) < self._settings.ttft_target_s

    def _note(self) -> None:
        """The queue has changed."""
        self._drain.set_busy(self._queue.num_waiting > 0, _now())
        if self._metrics is not None:
            self._metrics.set("admission_waiting_requests", self._queue.num_waiting)
            self._metrics.set("admission_waiting_tokens", self._queue.num_tokens)

    def _expected_wait(self, entry: Waiting[_Turn]) -> float:
        """Seconds until its turn at the rate that was measured; 0 before anything was."""
        rate = self._drain.rate(_now())
        if rate is None:
            return 0.0
        return self._queue.tokens_before(entry.tenant, entry.cost, entry.priority) / rate

    def _retry_after(self, expected: float, longest: float) -> float:
        """Seconds until half of what is before it is gone, and the rest can be waited for."""
        return min(max(expected / 2, expected - longest, MIN_RETRY_S), MAX_RETRY_S)

    # --- sending -------------------------------------------------------------------------------------------

    async def _send(
        self,
        entry: Waiting[_Turn],
        request: GenerateRequest,
        wait: tuple[float, float],
        *,
        is_charged: bool,
    ) -> Generation:
        tenant = self._tenants.get(request.tenant)
        if tenant is not None and tenant.priority is not None:
            # A client's own priority orders its tenant's requests; between tenants the operator's counts.
            request = replace(request, priority=tenant.priority)
        try:
            generation = await self._client.generate(request)
        except Exception:
            if is_charged:
                self._queue.charge(request.tenant, -entry.cost)
            raise
        finally:
            self._sending.pop(request.request_id, None)
            self._let_go()
        return _Watched(generation, wait, lambda event: self._began(entry, request, event, is_charged=is_charged))

    def _began(
        self, entry: Waiting[_Turn], request: GenerateRequest, event: StreamDelta, *, is_charged: bool
    ) -> None:
        """The first event tells how much was computed, and that an engine has done so much less to do."""
        if is_charged and event.token_ids:
            computed = len(request.prompt_ids) + len(request.output_ids) - event.num_cached
            self._queue.charge(request.tenant, computed - entry.cost)
        self._let_go()


class _Watched(PassedOn):
    """Its first token (or its end) is looked at, and its course begins with the wait here."""

    def __init__(
        self, generation: Generation, wait: tuple[float, float], began: Callable[[StreamDelta], None]
    ) -> None:
        super().__init__(generation)
        self._asked_at, self._sent_at = wait
        self._began: Callable[[StreamDelta], None] | None = began

    @property
    def course(self) -> Course:
        """Where it was, and when; the wait here is part of it."""
        return replace(super().course, asked_at=self._asked_at, sent_at=self._sent_at)

    async def __anext__(self) -> StreamDelta:
        """The next event."""
        event = await super().__anext__()
        if self._began is not None and (event.token_ids or event.finish_reason is not None):
            began, self._began = self._began, None
            began(event)
        return event


def _now() -> float:
    return asyncio.get_running_loop().time()


def _label(tenant: str) -> str:
    return tenant or ANONYMOUS.name
