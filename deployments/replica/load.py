"""An engine's load, in the form for each of its readers.

LoadReporter   routers, with each heartbeat on the wire: the queue, the pages, and rates measured over time
WorkMeter      Serve's autoscaler: arriving work, waiting work, and the share of each capacity that is in use
DrainRate      clients that were refused: when the queue will be shorter (Retry-After)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from deployments.wire.backlogs import BacklogTotals
from deployments.wire.messages import Load
from engine.scheduling.stats import EngineLoad, StepStats
from router.cost import evict_price

MIN_MEASURED_TOKENS = 64
"""A step with at least this many prompt tokens measures the prefill rate, except for the first, which is slow."""
MEASURED_FOR_S = 60.0
"""Seconds for which a measured rate is valid; then it counts as unknown, and routers use the fleet's."""
SHARE_S = 5.0
"""Time constant of the share of time spent on prefill, in seconds."""

WINDOW_S = 10.0
"""Seconds over which `DrainRate` averages."""
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class LoadReporter:
    """Follows an engine's steps in the engine's thread (`on_step`); `read` is callable from any thread."""

    def __init__(
        self,
        load: Callable[[], EngineLoad],
        clock: Callable[[], float],
        max_running: int,
        max_waiting: int,
        finish_rate: Callable[[], float] = lambda: 0.0,
        is_draining: Callable[[], bool] = lambda: False,
        load_rates: Callable[[], tuple[float, ...]] = lambda: (),
        fetch_rate: Callable[[], float] = lambda: 0.0,
        failing: Callable[[], str] = lambda: "",
        seconds_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`max_running` requests fill the batch, `max_waiting` the queue; `clock` is the engine's.

        `load_rates` returns the tokens/s that each tier below the device gives back, the fastest first, and
        `fetch_rate` those that come from another replica, 0 if none do. `failing` returns why the engine
        computes nothing, "" while it is healthy. `seconds_left` returns the seconds until its machine
        ends, where that was announced.
        """
        self._seconds_left = seconds_left
        self._load_rates, self._fetch_rate = load_rates, fetch_rate
        self._max_running, self._finish_rate = max_running, finish_rate
        self._is_draining, self._failing = is_draining, failing
        self._load, self._clock, self._max_waiting = load, clock, max_waiting
        self._share = 0.0
        self._measured_at = -math.inf
        self._num_measured = 0
        self._share_at = clock()

    def on_step(self, stats: StepStats) -> None:
        """Add a step's prefill to the share of time spent on it."""
        rate = self._load().prefill_rate
        if stats.num_prefill_tokens >= MIN_MEASURED_TOKENS:
            self._measured_at, self._num_measured = self._clock(), self._num_measured + 1
        if stats.num_prefill_tokens and rate:
            self._share = min(self._decayed() + stats.num_prefill_tokens / rate / SHARE_S, 1.0)
            self._share_at = self._clock()

    def read(self) -> Load:
        """Return the engine's part of the load; the wire adds the requests that are on their way."""
        load = self._load()
        pages = load.pages
        # Without an expiry, a replica that was slow once would receive no more prompts that could show otherwise.
        is_known = self._num_measured > 1 and self._clock() - self._measured_at < MEASURED_FOR_S
        rate = load.prefill_rate if is_known else 0.0
        return Load(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            queued_prefill_tokens=load.waiting_prefill_tokens,
            pages_free=pages.free + pages.evictable,
            pages_total=sum(pages),
            page_size=load.page_size,
            prefill_rate=rate,
            prefill_share=self._decayed(),
            decode_rate=load.num_running / load.decode_seconds if load.decode_seconds else 0.0,
            evict_price=evict_price(load.eviction_age, rate),
            is_draining=self._is_draining(),
            is_full=load.num_waiting >= self._max_waiting,
            max_running=self._max_running,
            finish_rate=self._finish_rate(),
            load_rates=self._load_rates(),
            fetch_rate=self._fetch_rate(),
            failing=self._failing(),
            num_deferrable=load.num_deferrable,
            deferrable_prefill_tokens=load.deferrable_prefill_tokens,
            requests_of=load.requests_of,
            seconds_left=self._seconds_left(),
        )

    def _decayed(self) -> float:
        return self._share * math.exp((self._share_at - self._clock()) / SHARE_S)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Totals at one moment."""

    now: float
    prefilled: int
    preemptions: int
    unserved: int
    """Tokens that wait in the engine now, and those that waited in ingresses or were rejected there."""
    turned_away: int
    unserved_requests: int
    """Like `unserved`, in requests."""
    finished: int


class WorkMeter:
    """The work that `deployments.replica.autoscaling` counts. Rates are averages since the last `read`.

    `on_step` runs in the engine's thread, `read` in any single thread.
    """

    def __init__(self, page_size: int, max_running: int, now: float) -> None:
        self._page_size, self._max_running = page_size, max_running
        self._prefilled = 0
        self._last = _Mark(now, 0, 0, 0, 0, 0, 0)

    def on_step(self, stats: StepStats) -> None:
        """Count a step."""
        self._prefilled += stats.num_prefill_tokens

    def read(self, load: EngineLoad, backlog: BacklogTotals, now: float) -> dict[str, float]:
        """Return the fields of `autoscaling.ReplicaWork`, and a count that makes Serve's records easier to read.

        `backlog` is the waiting work in the ingresses that report to this replica.
        """
        to_prefill, rate = load.waiting_prefill_tokens, load.prefill_rate
        unserved = to_prefill + backlog.unserved_tokens
        mark = _Mark(
            now,
            self._prefilled,
            load.num_preemptions,
            unserved,
            backlog.turned_away,
            load.num_waiting + backlog.unserved_requests,
            load.num_finished,
        )
        last, self._last = self._last, mark
        seconds = max(now - last.now, 1e-3)
        return {
            "queued_prefill_s": (to_prefill + backlog.num_tokens) / rate if rate else load.oldest_wait_seconds,
            "busy_share": (mark.prefilled - last.prefilled) / seconds / rate if rate else 0.0,
            "kv_share": max(self._page_share(load), self._batch_share(load)),
            "preemptions_per_s": (mark.preemptions - last.preemptions) / seconds,
            "unserved_share": (mark.unserved - last.unserved) / seconds / rate if rate else 0.0,
            "running": load.num_running,
            "held_back": backlog.num_requests,
            "turned_away_per_s": (mark.turned_away - last.turned_away) / seconds,
            "finished_per_s": (mark.finished - last.finished) / seconds,
            "unserved_per_s": (mark.unserved_requests - last.unserved_requests) / seconds,
            "waiting": load.num_waiting,
        }

    def _page_share(self, load: EngineLoad) -> float:
        pages = load.pages
        waiting = load.waiting_prefill_tokens / self._page_size
        return (pages.locked + pages.private + waiting) / max(sum(pages), 1)

    def _batch_share(self, load: EngineLoad) -> float:
        return (load.num_running + load.num_waiting) / self._max_running


class DrainRate:
    """The speed at which an engine reduces its queue. Belongs to one thread, except for methods that read."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque()  # (time, prefill tokens, finished requests), totals
        self._prefill_tokens = 0

    def observe(self, now: float, prefill_tokens: int, num_finished: int) -> None:
        """Note that a step computed `prefill_tokens`, and `num_finished` requests have ended since the start."""
        self._prefill_tokens += prefill_tokens
        # A hundred marks per window are enough.
        if self._marks and now - self._marks[-1][0] < WINDOW_S / 100:
            return
        self._marks.append((now, self._prefill_tokens, num_finished))
        while now - self._marks[0][0] > WINDOW_S:
            self._marks.popleft()

    @property
    def finish_rate(self) -> float:
        """Return the requests finished per second in the last `WINDOW_S`; 0 before any."""
        marks = list(self._marks)
        if len(marks) < 2:
            return 0.0
        (began, _, before), (ended, _, finished) = marks[0], marks[-1]
        return (finished - before) / max(ended - began, 1e-3)

    def retry_after_s(self, load: EngineLoad) -> float:
        """Return seconds until half of the queue is gone, by tokens or requests, whichever is more: 1 to 60."""
        marks = list(self._marks)
        if len(marks) < 2:
            return MIN_RETRY_S
        (began, tokens_before, finished_before), (ended, tokens, finished) = marks[0], marks[-1]
        seconds = max(ended - began, 1e-3)
        token_rate = max((tokens - tokens_before) / seconds, 1.0)
        request_rate = max((finished - finished_before) / seconds, 0.1)
        wait = max(load.waiting_prefill_tokens / token_rate, load.num_waiting / request_rate) / 2
        return min(max(wait, MIN_RETRY_S), MAX_RETRY_S)
