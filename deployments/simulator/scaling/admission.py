"""A simulated ingress's admission: the real queue and its bounds, on simulated time instead of an event loop.

The rules are those of `deployments/admission/admission.py`, for one tenant with equal requests.
"""

from __future__ import annotations

from functools import partial

from deployments.admission.busy_rate import BusyRate
from deployments.admission.fair_queue import AdmissionQueueFull, FairQueue, Waiting
from deployments.config.settings import AdmissionSettings
from deployments.simulator.fleet.fleet import SimulatedFleet
from deployments.simulator.fleet.replica import Job
from deployments.wire.messages import Backlog

TICK_S = 0.05
"""Seconds between two looks at the engines' load while requests wait; simulated reports come no more often."""


class SimulatedAdmission:
    """The admission of one ingress of a fleet."""

    def __init__(self, fleet: SimulatedFleet, ingress: int, settings: AdmissionSettings) -> None:
        self._fleet, self._ingress, self._settings = fleet, ingress, settings
        self._queue: FairQueue[Job] = FairQueue({}, settings)
        self._waiting: set[Waiting[Job]] = set()
        self._drain = BusyRate()
        self._turned_away = self._turned_away_tokens = 0
        self._has_tick = False

    def arrive(self, job: Job, now: float) -> None:
        """Send a request immediately, let it wait, or refuse it."""
        entry = Waiting(job, "", max(1, self._fleet.uncached_tokens(job, now)))
        if not self._waiting and self._has_room(now):
            self._fleet.submit(job, now)
        elif self._is_too_late(entry, now):
            self._turn_away(entry)
        else:
            self._wait(entry, now)

    def give_turns(self, now: float) -> None:
        """Send requests while an engine has room; look again after a tick while any wait."""
        while self._waiting and self._has_room(now):
            entry = self._queue.pop()
            assert entry is not None
            self._waiting.remove(entry)
            self._drain.add(entry.cost, now)
            self._fleet.submit(entry.item, now)
        self._drain.set_busy(bool(self._waiting), now)
        if self._waiting and not self._has_tick:
            self._has_tick = True
            self._fleet.at(now + TICK_S, self._tick)

    def backlog(self) -> Backlog:
        """Return the report that an ingress would send."""
        waiting, tokens = self._queue.num_waiting, self._queue.num_tokens
        return Backlog(waiting, tokens, self._turned_away, self._turned_away_tokens)

    @property
    def is_clear(self) -> bool:
        """Whether no request waits."""
        return not self._waiting

    def _wait(self, entry: Waiting[Job], now: float) -> None:
        try:
            self._queue.push(entry)
        except AdmissionQueueFull:
            self._turn_away(entry)
            return
        self._waiting.add(entry)
        self._fleet.at(now + self._settings.max_wait_s, partial(self._expire, entry))
        self.give_turns(now)

    def _tick(self, now: float) -> None:
        self._has_tick = False
        self.give_turns(now)

    def _expire(self, entry: Waiting[Job], now: float) -> None:
        if entry in self._waiting:
            self._waiting.remove(entry)
            self._queue.remove(entry)
            self._turn_away(entry)
            self.give_turns(now)

    def _turn_away(self, entry: Waiting[Job]) -> None:
        self._turned_away += 1
        self._turned_away_tokens += entry.cost

    def _has_room(self, now: float) -> bool:
        return self._fleet.shortest_queue(self._ingress, now) < self._settings.ttft_target_s

    def _is_too_late(self, entry: Waiting[Job], now: float) -> bool:
        rate = self._drain.rate(now)
        before = self._queue.tokens_before(entry.tenant, entry.cost)
        return rate is not None and before / rate > self._settings.max_wait_s
