"""Loads a model and its draft model on one device, with KV pages for both."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.drafting.draft_model import DraftModel
from engine.drafting.vocabulary import check_same_vocabulary
from engine.loading.load_model import load_model
from engine.loading.model_directory import resolve_model
from engine.ranks.load_runner import load_runner
from engine.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from engine.ranks.launcher import WorkerLauncher
    from engine.ranks.runner import ParallelRunner


def load_with_draft_model(
    config: EngineConfig, launcher: WorkerLauncher | None = None
) -> tuple[ModelRunner | ParallelRunner, DraftModel]:
    """Load the models that `config` and its `speculation` name. Raises ModelLoadError, ValueError.

    Where several ranks share the model, the first rank alone has the draft model.

    The draft model's weights are loaded first, so that KV gets the memory that both leave free. If the draft model
    has as many pages as the model, a page counts with the memory of both.
    """
    settings = config.speculation
    assert settings is not None and settings.model is not None
    directory = resolve_model(config.model, config.model_revision)
    check_same_vocabulary(config.model, directory, settings.model, resolve_model(settings.model))
    draft = load_model(
        dataclasses.replace(
            config,
            model=settings.model,
            model_revision=None,
            served_name=None,
            kv_pages=settings.kv_pages or 1,
            max_model_len=None,
            preemption="recompute",
            host_kv_gib=0.0,
            speculation=None,
            tensor_parallel_size=1,
            cuda_graphs="off",  # Its steps return logits, which graphs do not.
        )
    )
    if draft.num_state_slots:
        raise ValueError(
            f"speculation.model {settings.model!r} has recurrent layers, whose states it would lose with wrong "
            "draft tokens; take one without them"
        )
    if settings.kv_pages is not None:
        runner = load_runner(config, launcher=launcher)
    else:
        runner = load_runner(config, draft.kv_bytes_per_token, launcher)
        draft = draft.with_pages(runner.num_pages)
    return runner, DraftModel(draft, runner.model_config.eos_token_ids, settings.max_prefill_tokens)
