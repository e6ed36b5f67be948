"""An engine's load as the work that `deployments.replica.autoscaling` counts."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.stats import EngineLoad, StepStats


@dataclass(frozen=True, slots=True)
class _Mark:
    """Totals at one moment."""

    now: float
    prefilled: int
    preemptions: int


class WorkMeter:
    """`on_step` runs in the engine's thread, `read` in any one other. Rates are those since the last read."""

    def __init__(self, page_size: int, max_running: int, now: float) -> None:
        self._page_size, self._max_running = page_size, max_running
        self._prefilled = 0
        self._last = _Mark(now, 0, 0)

    def on_step(self, stats: StepStats) -> None:
        """Count a step."""
        self._prefilled += stats.num_prefill_tokens

    def read(self, load: EngineLoad, now: float) -> dict[str, float]:
        """The stats that `autoscaling.ReplicaWork` describes, and what else is worth a look in Serve's records."""
        mark = _Mark(now, self._prefilled, load.num_preemptions)
        last, self._last = self._last, mark
        seconds = max(now - last.now, 1e-3)
        to_prefill, rate = load.waiting_prefill_tokens, load.prefill_rate
        return {
            "queued_prefill_s": to_prefill / rate if rate else load.oldest_wait_seconds,
            "busy_share": (mark.prefilled - last.prefilled) / seconds / rate if rate else 0.0,
            "kv_share": max(self._page_share(load, to_prefill), self._batch_share(load)),
            "preemptions_per_s": (mark.preemptions - last.preemptions) / seconds,
            "running": load.num_running,
            "waiting": load.num_waiting,
        }

    def _page_share(self, load: EngineLoad, to_prefill: int) -> float:
        pages = load.pages
        return (pages.locked + pages.private + to_prefill / self._page_size) / max(sum(pages), 1)

    def _batch_share(self, load: EngineLoad) -> float:
        return (load.num_running + load.num_waiting) / self._max_running
