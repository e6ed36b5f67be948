"""Executes steps with an encoder: whole prompts, without keeping KV.

The scheduler counts pages for them as for any prompt, but these have no memory: there are as many as the largest
batch of the longest prompts needs, so no prompt waits for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from engine.attention.pinned import on_host
from engine.base.machine import usable_cores
from engine.host_tier.host_pool import HostMemory
from engine.host_tier.lower_tier import LowerTier, NoLowerTier
from engine.model_config.encoder import EncoderConfig
from engine.models.encoders.batch import EncoderBatch
from engine.models.encoders.encoder import EncoderModel
from engine.sampling.pooled import packed
from engine.values.plan import Step, StepPlan, StepResult

_SPARE_PAGES = 4
"""Pages of each request beyond its prompt's, which the scheduler promises for tokens that are never generated."""


class EncoderRunner:
    """A loaded encoder. Implements `engine.program.engine.LoadedRunner`."""

    is_encoder = True
    num_state_slots = 0
    host_memory = HostMemory()
    page_memory = layer_groups = None
    attention_name = "torch"

    def __init__(
        self,
        model_config: EncoderConfig,
        encoder: EncoderModel,
        max_model_len: int,
        max_running: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._config, self._encoder, self.device = model_config, encoder, device
        self.max_model_len, self.page_size = max_model_len, page_size
        self.num_pages = max_running * (-(-max_model_len // page_size) + _SPARE_PAGES)
        self.lower_tier: LowerTier = NoLowerTier()
        self.fingerprint = ""
        self.dtype = encoder.tokens.dtype

    @property
    def model_config(self) -> EncoderConfig:
        """Facts about the model."""
        return self._config

    @property
    def takes_all_cores(self) -> bool:
        """Whether steps use all of this process's cores."""
        return self.device.type == "cpu" and torch.get_num_threads() >= usable_cores()

    def prepare(self, plan: StepPlan) -> Step:
        """Implement `Runner`. Each chunk is a whole prompt."""
        prompts = [list(chunk.token_ids) for chunk in plan.chunks]
        assert all(chunk.start == 0 for chunk in plan.chunks), "an encoder computes whole prompts"
        return partial(self._compute, [chunk.request.request_id for chunk in plan.chunks], prompts)

    @torch.inference_mode()
    def _compute(self, request_ids: Sequence[str], prompts: Sequence[Sequence[int]]) -> StepResult:
        if not prompts:
            return StepResult((), ())
        values = on_host(self._encoder(EncoderBatch(prompts, self.device)))
        return StepResult(
            (), (), pooled={name: packed(own) for name, own in zip(request_ids, values, strict=True)}
        )
