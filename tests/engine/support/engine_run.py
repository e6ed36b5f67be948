"""An engine whose steps a test takes itself, with the results of its requests and the counters of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.program.engine import Engine
from engine.ranks.launcher import WorkerLauncher
from engine.runner.draft_model import DraftModel
from engine.scheduling.stats import StepStats
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta


class Run:
    """An engine, its requests' results, and its steps' counters."""

    def __init__(self, config: EngineConfig, launcher: WorkerLauncher | None = None) -> None:
        self.engine = Engine.from_config(config, launcher=launcher)
        self.events: dict[str, list[StreamDelta]] = {}
        self.steps: list[StepStats] = []
        self.engine.loop.on_step = self.steps.append

    def submit(self, name: str, prompt: Sequence[int], sampling: SamplingParams, **options: Any) -> None:
        self.events[name] = []
        self.engine.loop.submit(self.engine.new_request(name, prompt, sampling, **options))

    def step(self) -> None:
        for event in self.engine.loop.step():
            self.events[event.request_id].append(event)

    def finish(self) -> None:
        while self.engine.loop.has_work:
            self.step()
        drafter = self.engine.scheduler.speculator.drafter
        for cache in [self.engine.cache, *([drafter.cache] if isinstance(drafter, DraftModel) else [])]:
            account = cache.account()
            assert account.locked == account.private == 0
            assert sum(account) == cache.num_pages

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.events[name] for token in event.token_ids]

    @property
    def num_accepted(self) -> int:
        return sum(step.num_accepted_tokens for step in self.steps)

    @property
    def num_drafts(self) -> int:
        return sum(step.num_draft_tokens for step in self.steps)
