"""Simulated engines on an event loop whose clock jumps from timer to timer, so that sleeps take no real time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from deployments.client.protocol import (
    FleetHealth,
    FoundPart,
    FoundStream,
    GenerateRequest,
    Generation,
    ReplicaHealth,
    Turn,
)
from deployments.client.timeline import Timeline
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta
from router.addresses import ReplicaAddress
from router.fleet import Fleet
from router.member import ReplicaLoad
from tests.deployments.support.turns import CountedSelector, TurnLoop

T = TypeVar("T")


class _Jumping(CountedSelector):
    """Moves the clock to the next timer instead of waiting for it."""

    now = 0.0

    def seconds_to_wait(self, timeout: float | None) -> float:
        assert timeout is not None, "all tasks wait and no timer is set: the scenario would hang"
        self.now += max(timeout, 0.0)
        return 0.0


class VirtualLoop(TurnLoop):
    """A deterministic event loop: timers fire in order, and no time passes between them."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def pass_time(self, seconds: float) -> None:
        """Move the clock, as while a callback computes."""
        self._jumping.now += seconds


def run(scenario: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)


@dataclass(eq=False)
class Replica:
    """Prefills one prompt after the other, in the order of their arrival."""

    name: str
    rate: float
    free_at: float = 0.0

    def queue_seconds(self) -> float:
        return max(0.0, self.free_at - now())


class VirtualFleet:
    """`Engines` that send to the least busy replica, and a `LoadView` that is always up to date."""

    def __init__(self, num_replicas: int = 1, rate: float = 1000.0, accept_s: float = 0.005) -> None:
        self.replicas = [Replica(f"r{number}", rate) for number in range(num_replicas)]
        self.accept_s = accept_s
        self.cached = 0
        """Leading tokens of every prompt that turn out to be cached, unknown to `uncached_tokens`."""
        self.refuse_with: Exception | None = None
        self.order: list[GenerateRequest] = []
        self.most_queued_s = 0.0
        self.open = 0

    are_awaited = False

    def expect_none(self) -> None: ...

    def prepared(self, request: GenerateRequest) -> GenerateRequest:
        return request

    async def generate(self, request: GenerateRequest, turn: Turn | None = None) -> VirtualGeneration:
        await asyncio.sleep(self.accept_s)
        if self.refuse_with is not None:
            raise self.refuse_with
        replica = min(self.replicas, key=Replica.queue_seconds)
        computed = len(request.prompt_ids) - self.cached
        replica.free_at = max(replica.free_at, now()) + computed / replica.rate
        self.order.append(request)
        self.most_queued_s = max(self.most_queued_s, replica.queue_seconds())
        self.open += 1
        return VirtualGeneration(self, replica, request, turn)

    async def find(self, name: str, tenant: str) -> FoundStream | None:
        return None

    async def adopt(self, request: GenerateRequest, found: FoundPart) -> Generation:
        raise AssertionError("it keeps no streams")

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        return []

    async def health(self) -> FleetHealth:
        replicas = tuple(
            ReplicaHealth(r.name, True, 0.0, waiting_prefill_tokens=int(r.queue_seconds() * r.rate))
            for r in self.replicas
        )
        return FleetHealth("healthy", len(replicas), replicas)

    def queue_seconds(self, num_sending: int) -> float:
        rate = sum(replica.rate for replica in self.replicas)
        return min(replica.queue_seconds() for replica in self.replicas) + num_sending / rate

    has_engines = True

    def given_way(self, tenants: Collection[str], num_sending: int) -> set[str]:
        return set()

    def num_idle(self) -> int:
        return sum(not replica.queue_seconds() for replica in self.replicas)

    def uncached_tokens(self, request: GenerateRequest) -> int:
        return len(request.prompt_ids)


class ObservedFleet:
    """A `VirtualFleet` as the router's `Fleet` knows it: own requests at once, everything else from heartbeats."""

    def __init__(self, fleet: VirtualFleet, heartbeat_s: float = 0.05) -> None:
        self.known = Fleet(clock=now)
        self._fleet, self._heartbeat_s = fleet, heartbeat_s
        self._num_placed = dict.fromkeys((replica.name for replica in fleet.replicas), 0)
        self.known.update({name: ReplicaAddress(name, f"tcp://{name}", "secret") for name in self._num_placed})

    are_awaited = False

    def expect_none(self) -> None: ...

    def prepared(self, request: GenerateRequest) -> GenerateRequest:
        return request

    async def generate(self, request: GenerateRequest, turn: Turn | None = None) -> VirtualGeneration:
        self.known.open(request.request_id)
        try:
            generation = await self._fleet.generate(request, turn)
            assert generation.replica is not None
            self.known.book(request.request_id, generation.replica, len(request.prompt_ids))
            if turn is not None:
                turn.sent()
            self._num_placed[generation.replica] += 1
            return generation
        finally:
            asyncio.get_running_loop().call_later(self._heartbeat_s, self.known.release, request.request_id)

    async def health(self) -> FleetHealth:
        return await self._fleet.health()

    async def find(self, name: str, tenant: str) -> FoundStream | None:
        return None

    async def adopt(self, request: GenerateRequest, found: FoundPart) -> Generation:
        raise AssertionError("it keeps no streams")

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        return []

    async def send_heartbeats(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            for replica in self._fleet.replicas:
                load = ReplicaLoad(
                    queued_prefill_tokens=int(replica.queue_seconds() * replica.rate),
                    dispatches_seen=self._num_placed[replica.name],
                    prefill_rate=replica.rate,
                )
                self.known.record_load(replica.name, load)
            await asyncio.sleep(self._heartbeat_s)


class VirtualGeneration:
    """Yields one token when its prefill is done."""

    def __init__(self, fleet: VirtualFleet, replica: Replica, request: GenerateRequest, turn: Turn | None) -> None:
        self._fleet, self._request, self._turn = fleet, request, turn
        self.replica: str | None = replica.name
        self._ready_at = replica.free_at
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        if self._is_over:
            raise StopAsyncIteration
        await asyncio.sleep(self._ready_at - now())
        await self.aclose()
        delta = StreamDelta(self._request.request_id, [1], finish_reason="length", num_cached=self._fleet.cached)
        if self._turn is not None:
            self._turn.began(delta)
        return delta

    @property
    def timeline(self) -> Timeline:
        return Timeline(0.0, 0.0)

    def explain(self) -> dict[str, Any] | None:
        return None

    async def detach(self) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._fleet.open -= 1


def request(request_id: str, tenant: str = "", tokens: int = 100, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id, "m", [0] * tokens, SamplingParams(max_tokens=1, seed=1), tenant=tenant, **fields
    )


def now() -> float:
    return asyncio.get_running_loop().time()
