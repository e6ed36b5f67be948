"""A model and its draft model on one device, with KV pages for both."""

from __future__ import annotations

import dataclasses

from engine.config import EngineConfig
from engine.drafting.draft_model import DraftModel
from engine.drafting.vocabulary import check_same_vocabulary
from engine.hub import resolve_model
from engine.model_runner import ModelRunner


def load_with_draft_model(config: EngineConfig) -> tuple[ModelRunner, DraftModel]:
    """Load the models that `config` and its `speculation` name. Raises ModelLoadError, ValueError.

    The draft model's weights come first, so that what is free for KV is what both leave. Where it gets as many
    pages as the model, a page takes the memory of both.
    """
    settings = config.speculation
    assert settings is not None and settings.model is not None
    check_same_vocabulary(config.model, resolve_model(config.model), settings.model, resolve_model(settings.model))
    draft = ModelRunner.load(
        dataclasses.replace(
            config,
            model=settings.model,
            served_name=None,
            kv_pages=settings.kv_pages or 1,
            max_model_len=None,
            preemption="recompute",
            host_kv_gib=0.0,
            speculation=None,
        )
    )
    if settings.kv_pages is not None:
        runner = ModelRunner.load(config)
    else:
        runner = ModelRunner.load(config, kv_bytes_beside=draft.kv_bytes_per_token)
        draft = draft.with_pages(runner.num_pages)
    return runner, DraftModel(draft, runner.model_config.eos_token_ids, settings.max_prefill_tokens)
