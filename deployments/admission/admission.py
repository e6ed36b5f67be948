"""Late binding: when every engine is busy, requests wait here, tenant by tenant, instead of in an engine's queue.

    admit ── an engine has less than ttft_target_s queued, and no request waits ──▶ immediately ─┐
      └── else ─▶ FairQueue ── an engine has room again ─▶ the next tenant's turn ───────────────┴─▶ an engine

An engine orders its own queue, by priority and arrival unless its policy is "fair", and no other engine takes over
its requests. Therefore only about `ttft_target_s` of work is sent to engines, and the order of the rest is decided
late. One tenant's flood then delays another by at most that much, and a turn of each tenant that waits: if a
batch is full of one tenant's requests, the engine preempts some of them for another's, which are sent for that
purpose. Without tenants, the addresses of clients take turns instead.

Requests of batches have a separate queue. One is sent only while no other request waits and an engine could
run it immediately, so batches use the remaining capacity. A batch's requests at an engine do not make others wait.

A request leaves the queue when it is sent or refused, or when its client leaves; its place and charge go with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec import structs

from deployments.admission.busy_rate import BusyRate
from deployments.admission.fair_queue import AdmissionQueueFull, FairQueue, Waiting
from deployments.admission.waiting_work import WaitingWork
from deployments.client.protocol import GenerateRequest, Overloaded, OverloadKind, Unavailable
from deployments.config.settings import AdmissionSettings
from deployments.config.tenants import ANONYMOUS, Tenant
from deployments.wire.deadlines.time_limit import timeout
from deployments.wire.messages import Backlog
from engine.values.stream_delta import StreamDelta
from monitoring.metrics import Metrics, Series

TICK_S = 0.01
"""Seconds between two checks of the engines' load while requests wait; the load itself arrives over the wire."""
MIN_RETRY_S, MAX_RETRY_S = 1.0, 600.0


class LoadView(Protocol):
    """The engines' load as this process knows it, without asking them."""

    def queue_seconds(self, num_sending: int) -> float:
        """Return the seconds until the least busy engine would start a new prompt. When no engine is up: infinite
        if one is expected, else 0.

        `num_sending` is the number of uncached tokens of requests whose turn has come and that the view does not
        count at an engine yet: they are spread over all engines.
        """

    def given_way(self, tenants: Collection[str], num_sending: int) -> set[str]:
        """Return those of `tenants` whose next request would make a full engine preempt another tenant's request,
        while `num_sending` requests are on their way (`engine/tenants/tenant_shares.py`).
        """

    def num_idle(self) -> int:
        """Return how many more requests the engines could run concurrently."""

    def uncached_tokens(self, request: GenerateRequest) -> int:
        """Return the number of prompt tokens that the engine to be chosen would have to compute."""

    @property
    def has_engines(self) -> bool:
        """Whether any engine is up."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A request in the queue, and the future that is set when its turn comes."""

    request_id: str
    turn: asyncio.Future[None]
    is_apart: bool
    """Whether its prompt goes to replicas that only compute prompts."""
    is_deferrable: bool
    """Whether it yields to all requests that are not deferrable."""


class Admission:
    """The `AdmissionControl` of one model in one ingress. Lives on one event loop."""

    def __init__(
        self,
        load: LoadView,
        settings: AdmissionSettings,
        tenants: Mapping[str, Tenant],
        metrics: Metrics | None = None,
        is_apart: Callable[[int], bool] = lambda num_uncached: False,
    ) -> None:
        """`tenants` maps names to tenants; all other tenants weigh 1. `is_apart` tells whether a prompt with so
        many uncached tokens goes to replicas that only compute prompts.
        """
        self._load, self._settings, self._tenants, self._metrics = load, settings, tenants, metrics
        self._queue: FairQueue[_Place] = FairQueue(_weights(tenants), settings)
        self._deferrable: FairQueue[_Place] = FairQueue(_weights(tenants), settings)
        self._sending: dict[str, int] = {}  # uncached tokens of requests that are not placed yet
        self._drain = BusyRate()
        self._is_apart, self._work = is_apart, WaitingWork()
        self._timer: asyncio.TimerHandle | None = None
        self._waits_of: dict[str, Series] = {}  # tenant -> its series; names come from the configuration

    def take_over(self, settings: AdmissionSettings, tenants: Mapping[str, Tenant]) -> None:
        """Apply new settings and tenants. A request that already waits keeps its maximum wait."""
        self._settings, self._tenants = settings, tenants
        for queue in (self._queue, self._deferrable):
            queue.take_over(_weights(tenants), settings)
        self._give_turns()

    async def admit(self, request: GenerateRequest) -> AdmittedTurn:
        """Wait until the request may be sent. Raises Overloaded after, or instead of, a wait that is too long, and
        Unavailable after a wait without any engine.
        """
        arrival, asked_at = _now(), time.monotonic()
        cost = max(1, self._load.uncached_tokens(request))
        turn_comes = asyncio.get_running_loop().create_future()
        place = _Place(request.request_id, turn_comes, self._is_apart(cost), request.is_deferrable)
        entry = Waiting(place, request.sharer, cost, request.priority)
        has_waited = bool(self._queue_of(request).num_waiting) or not self._has_room(request)
        if has_waited:
            try:
                await self._wait(entry, request)
            except BaseException:  # The request is refused, or its client has left.
                self._work.turn_away(cost, is_apart=place.is_apart)
                raise
        else:
            self._begin_sending(place, cost)
        tenant = self._tenants.get(request.tenant)
        if tenant is not None and tenant.priority is not None:
            # The client's priority orders its tenant's requests; the operator's orders tenants.
            request = structs.replace(request, priority=tenant.priority)
        turn = AdmittedTurn(self, request, asked_at, time.monotonic(), cost if has_waited else None)
        try:
            if self._metrics is not None:
                self._waits(self._metrics, request.tenant).observe(_now() - arrival)
        except Exception:
            turn.refused()
            turn.sent()
            raise
        return turn

    def _waits(self, metrics: Metrics, tenant: str) -> Series:
        """Return the series of a tenant's waits."""
        waits = self._waits_of.get(tenant)
        if waits is None:
            waits = self._waits_of[tenant] = metrics.series("tenant_queue_seconds", tenant=_label(tenant))
        return waits

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait here."""
        return self._queue.num_waiting + self._deferrable.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Number of uncached prompt tokens of the requests that wait here."""
        return self._queue.num_tokens + self._deferrable.num_tokens

    @property
    def num_sending(self) -> int:
        """Number of requests whose turn has come, and that are not placed yet."""
        return len(self._sending)

    def backlog(self, role: str = "") -> Backlog:
        """Return the waiting and rejected work, for the autoscaler of a role's replicas, or of all."""
        return self._work.backlog(role)

    # --- waiting -------------------------------------------------------------------------------------------

    async def _wait(self, entry: Waiting[_Place], request: GenerateRequest) -> None:
        """Wait for the request's turn, which charges its tokens and counts them as being sent."""
        longest = self._settings.max_wait_s
        if request.max_wait_s is not None:
            longest = min(longest, request.max_wait_s)
        expected = self._expected_wait(entry)
        if expected > longest:
            limit = f"{longest:g} s (admission.max_wait_s, x-max-wait-s)"
            reason = f"the wait for an engine is about {expected:.0f} s, and this request's limit is {limit}"
            raise Overloaded(reason, self._retry_after(expected, longest), "deadline")
        try:
            self._queue_of(entry.item).push(entry)
        except AdmissionQueueFull as full:
            kind: OverloadKind = "tenant_queue_full" if full.whose == "tenant" else "queue_full"
            raise Overloaded(full.reason, self._retry_after(expected, longest), kind) from None
        self._work.add(entry.cost, is_apart=entry.item.is_apart)
        try:
            self._on_queue_change()
            self._give_turns()
            with contextlib.suppress(TimeoutError), timeout(longest):
                await asyncio.wait((entry.item.turn,))
        except BaseException:
            self._give_up(entry)
            raise
        if not entry.item.turn.done():
            retry_after_s = self._retry_after(self._expected_wait(entry), longest)
            self._give_up(entry)
            limit = f"{longest:.3g} s (admission.max_wait_s, x-max-wait-s)"
            if not self._load.has_engines:
                raise Unavailable(f"no engine was up within {limit}")
            reason = f"no engine had room for this request within {limit}"
            raise Overloaded(reason, retry_after_s, "deadline")

    def _give_up(self, entry: Waiting[_Place]) -> None:
        """Remove a request that will not be sent, even if its turn has just come."""
        if entry.item.turn.done():
            self._sending.pop(entry.item.request_id, None)
            self._queue_of(entry.item).charge(entry.tenant, -entry.cost)
        else:
            self._queue_of(entry.item).remove(entry)
            self._work.remove(entry.cost, is_apart=entry.item.is_apart)
        self._on_queue_change()
        self._give_turns()

    def _give_turns(self) -> None:
        """Give requests their turns while an engine has room; check again after a tick while any wait."""
        try:
            while (entry := self._next()) is not None:
                self._work.remove(entry.cost, is_apart=entry.item.is_apart)
                if not entry.item.is_deferrable:
                    self._drain.add(entry.cost, _now())
                self._begin_sending(entry.item, entry.cost)
                entry.item.turn.set_result(None)
                self._on_queue_change()
        finally:
            if self.num_waiting and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._timer = None
        self._give_turns()

    def _next(self) -> Waiting[_Place] | None:
        """Remove and return the next request; None if no request has its turn."""
        if self._queue.num_waiting:
            if self._has_engine():
                return self._queue.pop()
            # These need not wait until one of the other tenants' requests ends.
            return self._queue.pop(self._load.given_way(self._queue.tenants, self.num_sending))
        if self._deferrable.num_waiting and self._has_idle_engine():
            return self._deferrable.pop()
        return None

    def _queue_of(self, request: GenerateRequest | _Place) -> FairQueue[_Place]:
        return self._deferrable if request.is_deferrable else self._queue

    def _begin_sending(self, place: _Place, cost: int) -> None:
        self._sending[place.request_id] = 0 if place.is_deferrable else cost

    def _has_room(self, request: GenerateRequest) -> bool:
        return self._has_idle_engine() if request.is_deferrable else self._has_engine()

    def _has_idle_engine(self) -> bool:
        """Whether an engine could run another request immediately, and no client's request waits for that."""
        return not self._queue.num_waiting and self._load.num_idle() > self.num_sending and self._has_engine()

    def _has_engine(self) -> bool:
        return self._load.queue_seconds(sum(self._sending.values())) < self._settings.ttft_target_s

    def _on_queue_change(self) -> None:
        """Update the busy state and the metrics after a change of the queue."""
        self._drain.set_busy(self._queue.num_waiting > 0, _now())
        if self._metrics is not None:
            self._metrics.set("admission_waiting_requests", self.num_waiting)
            self._metrics.set("admission_waiting_tokens", self.num_waiting_tokens)

    def _expected_wait(self, entry: Waiting[_Place]) -> float:
        """Return the seconds until a request's turn at the measured rate; 0 before one was measured, and for one
        of a batch, which may wait up to its limit.
        """
        rate = self._drain.rate(_now())
        if rate is None or entry.item.is_deferrable:
            return 0.0
        return self._queue.tokens_before(entry.tenant, entry.cost, entry.priority) / rate

    def _retry_after(self, expected: float, longest: float) -> float:
        """Return the seconds until half of the queue before it is gone and the rest fits its longest wait."""
        return min(max(expected / 2, expected - longest, MIN_RETRY_S), MAX_RETRY_S)

    # --- after a turn ----------------------------------------------------------------------------------------

    def _sent(self, request_id: str) -> None:
        if self._sending.pop(request_id, None) is not None:
            self._give_turns()

    def _correct(self, request: GenerateRequest, tokens: float) -> None:
        """Charge a request's tenant for tokens computed beyond those charged; a negative number is a refund."""
        self._queue_of(request).charge(request.sharer, tokens)


class AdmittedTurn:
    """A request whose turn has come; see `deployments.client.protocol.Turn`."""

    def __init__(
        self,
        admission: Admission,
        request: GenerateRequest,
        asked_at: float,
        sent_at: float,
        charged: int | None,
    ) -> None:
        """`charged` is the number of tokens its tenant was charged; None for a request that did not wait."""
        self.request, self.asked_at, self.sent_at = request, asked_at, sent_at
        self._admission, self._charged = admission, charged

    def sent(self) -> None:
        """Report that the request counts at an engine now, or will not be sent. Idempotent."""
        self._admission._sent(self.request.request_id)

    def refused(self) -> None:
        """Refund the tenant's charge."""
        if self._charged is not None:
            self._admission._correct(self.request, -self._charged)

    def began(self, delta: StreamDelta) -> None:
        """Correct the charge to the tokens actually computed; the engine may have room for another request."""
        if self._charged is not None and delta.token_ids:
            computed = len(self.request.prompt_ids) + len(self.request.output_ids) - delta.num_cached
            self._admission._correct(self.request, computed - self._charged)
        self._admission._give_turns()


def _weights(tenants: Mapping[str, Tenant]) -> dict[str, float]:
    return {name: tenant.weight for name, tenant in tenants.items()}


def _now() -> float:
    return asyncio.get_running_loop().time()


def _label(tenant: str) -> str:
    return tenant or ANONYMOUS.name
