"""What a replica tells routers of its load: the engine's counts, and what only time shows."""

from __future__ import annotations

import math
from collections.abc import Callable

from deployments.wire.messages import Load
from engine.scheduling.stats import EngineLoad, StepStats
from router.cost import evict_price

MIN_MEASURED_TOKENS = 64
"""Prompt tokens of a step that says something of the prefill rate, unless it is the first, which is slow."""
MEASURED_FOR_S = 60.0
"""Seconds for which it does; then the rate counts as unknown, and routers take the fleet's."""
SHARE_S = 5.0
"""Time constant of the share of time spent on prefill, in seconds."""


class LoadNews:
    """Made from `on_step` in the engine's thread, read in any."""

    def __init__(
        self,
        load: Callable[[], EngineLoad],
        clock: Callable[[], float],
        max_running: int,
        max_waiting: int,
        finish_rate: Callable[[], float] = lambda: 0.0,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        """`max_running` requests fill the batch, `max_waiting` the queue; `clock` is the engine's."""
        self._max_running, self._finish_rate = max_running, finish_rate
        self._is_draining = is_draining
        self._load, self._clock, self._max_waiting = load, clock, max_waiting
        self._share = 0.0
        self._measured_at = -math.inf
        self._num_measured = 0
        self._share_at = clock()

    def on_step(self, stats: StepStats) -> None:
        """A step: what of its time went into prefill."""
        rate = self._load().prefill_rate
        if stats.num_prefill_tokens >= MIN_MEASURED_TOKENS:
            self._measured_at, self._num_measured = self._clock(), self._num_measured + 1
        if stats.num_prefill_tokens and rate:
            self._share = min(self._decayed() + stats.num_prefill_tokens / rate / SHARE_S, 1.0)
            self._share_at = self._clock()

    def read(self) -> Load:
        """The engine's part of the load; the wire adds what is on its way."""
        load = self._load()
        pages = load.pages
        # A replica that once was slow would otherwise get nothing any more that could show it is not.
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
        )

    def _decayed(self) -> float:
        return self._share * math.exp((self._share_at - self._clock()) / SHARE_S)
