"""A `LoadView` from what an ingress sees by itself: heartbeats, its own requests, and how fast they get on.

The rate is that of prompts getting their first token while any of this ingress waits for one: when slots or
memory are short it falls too, so what waits, divided by it, is a time (Little's law) whatever is short. Other
ingresses are taken to be as busy as this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.busy_rate import BusyRate
from deployments.client import EngineClient, FleetHealth, GenerateRequest, Generation
from deployments.passed_on import PassedOn
from engine.plan import Event

DEFAULT_PREFILL_RATE = 2000.0
"""Tokens per second of an engine until its rate is measured."""
REFRESH_S = 0.05
"""Between looks at the reports, in seconds."""
NEWS_S = 1.0
"""Age by which an accepted request is in its replica's reports: a long step, a heartbeat and a look, in seconds.

Until then it counts by itself, as long as it has no first token: what counted nowhere would be sent again.
"""


@dataclass(eq=False, slots=True)
class _Sent:
    """A request of this ingress that has no first token yet."""

    num_tokens: int
    uncached: int
    """As predicted."""
    replica: str | None = None
    accepted_at: float | None = None


class ObservedLoad:
    """An `EngineClient` that watches another, and what it saw as a `LoadView`. Lives on one event loop."""

    def __init__(
        self,
        client: EngineClient,
        num_ingresses: int = 1,
        predict: Callable[[GenerateRequest], int] | None = None,
    ) -> None:
        """`predict` says how many tokens of a request no engine has cached; without it, all count."""
        self._client, self._num_ingresses, self._predict = client, num_ingresses, predict
        self._sent: set[_Sent] = set()
        self._prefill = BusyRate()
        self._health, self._asked_at = FleetHealth("unhealthy", 0), float("-inf")
        self._refresh: asyncio.Task[None] | None = None

    # --- LoadView ------------------------------------------------------------------------------------------

    def queue_seconds(self, sending_tokens: int = 0) -> float:
        """Seconds of prefill queued at the replica with least; 0 when none is up."""
        now = _now()
        self._keep_fresh(now)
        up = [replica for replica in self._health.replicas if replica.is_connected and not replica.is_draining]
        if not up:
            return 0.0
        rate = self._prefill.rate(now)
        rate = DEFAULT_PREFILL_RATE if rate is None else rate * self._num_ingresses / len(up)
        least = min(max(replica.waiting_prefill_tokens, self._recent(replica.replica, now)) for replica in up)
        return (least + sending_tokens / len(up)) / rate

    def uncached_tokens(self, request: GenerateRequest) -> int:
        """As predicted."""
        return _num_tokens(request) if self._predict is None else self._predict(request)

    def _recent(self, replica: str, now: float) -> int:
        """Tokens accepted there, and not computed, so lately that its reports may not tell of them."""
        return sum(
            sent.uncached
            for sent in self._sent
            if sent.replica == replica and sent.accepted_at is not None and now - sent.accepted_at < NEWS_S
        )

    def _keep_fresh(self, now: float) -> None:
        if now - self._asked_at >= REFRESH_S and (self._refresh is None or self._refresh.done()):
            self._asked_at = now
            self._refresh = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        self._health = await self._client.health()

    # --- EngineClient --------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """As the client does."""
        sent = _Sent(_num_tokens(request), self.uncached_tokens(request))
        self._sent.add(sent)
        self._prefill.set_busy(True, _now())
        try:
            generation = await self._client.generate(request)
        except BaseException:
            self.began(sent, None)
            raise
        sent.replica, sent.accepted_at = generation.replica, _now()
        return _Observed(generation, self, sent)

    async def health(self) -> FleetHealth:
        """How the engines are."""
        return await self._client.health()

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        """The last placements."""
        return self._client.decisions(limit)

    def began(self, sent: _Sent, num_cached: int | None) -> None:
        """It has its first token, or will have none (None). Only the first call counts."""
        if sent in self._sent:
            self._sent.discard(sent)
            if num_cached is not None:
                self._prefill.add(max(0, sent.num_tokens - num_cached), _now())
            self._prefill.set_busy(bool(self._sent), _now())


class _Observed(PassedOn):
    """It tells its load view how it gets on."""

    def __init__(self, generation: Generation, load: ObservedLoad, sent: _Sent) -> None:
        super().__init__(generation)
        self._load, self._sent = load, sent

    async def __anext__(self) -> Event:
        """The next event."""
        try:
            event = await super().__anext__()
        except Exception:
            self._load.began(self._sent, None)
            raise
        if event.token_ids or event.finish_reason is not None:  # a prompt's log-probabilities come before
            self._load.began(self._sent, event.num_cached if event.token_ids else None)
        return event

    async def aclose(self) -> None:
        """Abort in the engine when not finished."""
        self._load.began(self._sent, None)
        await super().aclose()


def _num_tokens(request: GenerateRequest) -> int:
    return len(request.prompt_ids) + len(request.output_ids)


def _now() -> float:
    return asyncio.get_running_loop().time()
