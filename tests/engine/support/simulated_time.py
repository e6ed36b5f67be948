"""An engine on simulated time: the real scheduler, cache and loop, and a runner whose steps take a known time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cache import KVCacheManager, Namespace
from engine.program.loop import EngineLoop
from engine.scheduling.scheduler import Scheduler
from engine.settings.scheduling import SchedulerSettings
from engine.values.plan import Step, StepPlan, StepResult
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta

PAGE = 16


class SimulatedEngine:
    """Always samples token 1. `now` is its clock, in seconds."""

    def __init__(
        self,
        seconds: Callable[[StepPlan], float] = lambda plan: 1.0,
        num_pages: int = 20_000,
        micro_batches: int = 1,
        **limits: Any,
    ) -> None:
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.requests: dict[str, Request] = {}
        self.token_times: dict[str, list[float]] = {}
        self._seconds = seconds
        self.cache = KVCacheManager(num_pages, PAGE, prefix_cache=False)
        settings = SchedulerSettings(**{"max_step_ms": None, "max_step_stretch": None, **limits})
        self.scheduler = Scheduler(self.cache, settings, max_model_len=10**6, num_micro_batches=micro_batches)
        self.loop = EngineLoop(self.scheduler, self, clock=lambda: self.now)

    def prepare(self, plan: StepPlan) -> Step:
        """Prepare a step that advances the clock by the time that it takes."""

        def run() -> StepResult:
            self.plans.append(plan)
            self.now += self._seconds(plan)
            num_sampled = len(plan.sampling_chunks)
            return StepResult((1,) * num_sampled, (None,) * num_sampled)

        return run

    def arrive(
        self,
        num_prompt: int,
        max_tokens: int = 1,
        priority: int = 0,
        tenant: str = "",
        *,
        is_deferrable: bool = False,
    ) -> str:
        """Submit a request now and return its name; no two prompts share a prefix."""
        name = f"r{len(self.requests)}"
        request = Request.make(
            name,
            [len(self.requests) + 2] * num_prompt,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            arrival=self.now,
            seed=0,
            namespace=Namespace("m"),
            priority=priority,
            tenant=tenant,
            is_deferrable=is_deferrable,
        )
        self.now += 1e-9  # arrivals are in order
        self.requests[name], self.token_times[name] = request, []
        self.loop.submit(request)
        return name

    def step(self) -> list[StreamDelta]:
        """Take one engine step."""
        events = self.loop.step()
        for event in events:
            self.token_times[event.request_id] += [self.now] * len(event.token_ids)
        return events

    def run(self, until: Callable[[], bool] = lambda: False, most: int = 20_000) -> None:
        """Step until nothing is left to do, or until a condition holds."""
        for _ in range(most):
            if until() or not self.loop.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {most} steps")

    def first_token(self, name: str) -> float:
        """Return when a request got its first token."""
        return self.token_times[name][0]
