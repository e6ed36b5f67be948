"""A model that takes no time, for measurements of everything around it.

It runs in the real loop with the real scheduler and cache.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.host_tier.host_pool import HostMemory
from engine.host_tier.lower_tier import NoLowerTier
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.plan import Step, StepPlan, StepResult


@dataclass(frozen=True)
class NullModelConfig:
    """The properties of a model that an engine needs."""

    vocab_size: int = 32_000
    max_position_embeddings: int = 1_000_000
    eos_token_ids: frozenset[int] = frozenset()


class NullRunner:
    """Samples the same token every time; a step takes `step_s`, 0 for as fast as the loop can run. With tokens of
    prompts it takes `prompt_s` longer, however many there are, as where a GPU waits for what its host launches.
    """

    attention_name = device = dtype = "none"
    host_memory = HostMemory()
    lower_tier = NoLowerTier()
    num_state_slots = 0
    is_encoder = False
    layer_groups = None
    page_memory = None

    def __init__(
        self, num_pages: int = 65_536, step_s: float = 0.0, token: int = 101, prompt_s: float = 0.0
    ) -> None:
        self.model_config = NullModelConfig()
        self.num_pages = num_pages
        self._step_s, self._prompt_s, self._token = step_s, prompt_s, token

    def prepare(self, plan: StepPlan) -> Step:
        """Pretend."""
        num_sampled, seconds = len(plan.sampling_chunks), self._step_s + self._prompt_s * (plan.num_prefill > 0)
        result = StepResult((self._token,) * num_sampled, (None,) * num_sampled)

        def step() -> StepResult:
            if seconds:
                time.sleep(seconds)
            return result

        return step


@dataclass(frozen=True)
class NullEngines:
    """An engine factory for `deployments.app.bind_engines`."""

    step_s: float = 0.0
    token: int = 101
    prompt_s: float = 0.0

    def __call__(self, config: EngineConfig) -> Engine:
        """Return an engine without a model."""
        return Engine(config, NullRunner(config.kv_pages or 65_536, self.step_s, self.token, self.prompt_s))
