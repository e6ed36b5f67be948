"""Loads a model and its draft model on one device, with KV pages for both."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from engine.graphs.chain_graphs import ChainGraphs
from engine.graphs.setup import (
    Graphs,
    capture_all,
    draft_chains,
    draft_widths,
    graph_bytes,
    piece_tokens,
    why_none,
)
from engine.graphs.step_graphs import CudaCapture, CutCapture
from engine.loading.load_model import load_model
from engine.loading.same_vocabulary import check_same_vocabulary
from engine.model_files.model_directory import resolve_model
from engine.ranks.load_runner import load_runner
from engine.runner.draft_model import DraftModel
from engine.runner.drafts_behind import DraftsBehind
from engine.runner.model_runner import ModelRunner
from engine.settings.config import EngineConfig

if TYPE_CHECKING:
    from engine.ranks.launcher import WorkerLauncher
    from engine.ranks.runner import ParallelRunner


def load_with_draft_model(
    config: EngineConfig, launcher: WorkerLauncher | None = None
) -> tuple[ModelRunner | ParallelRunner, DraftModel]:
    """Load the models that `config` and its `speculation` name. Raises ModelLoadError, ValueError.

    If several ranks share the model, only the first rank has the draft model.

    The draft model's weights are loaded first, so that KV gets the memory that both leave free. If the draft model
    has as many pages as the model, a page counts with the memory of both.
    """
    settings = config.speculation
    assert settings is not None and settings.model is not None
    directory = resolve_model(config.model, config.model_revision)
    check_same_vocabulary(config.model, directory, settings.model, resolve_model(settings.model))
    draft = load_model(
        dataclasses.replace(
            config.of_draft_model(settings.model),
            served_name=None,
            kv_pages=settings.kv_pages or 1,
            max_model_len=None,
            preemption="recompute",
            host_kv_gib=0.0,
            cuda_graphs="off",  # Graphs are recorded below, on the draft model's own pages.
            windowed_kv="off",  # The draft model supports only pages of all layers.
        )
    )
    if draft.num_state_slots:
        raise ValueError(
            f"speculation.model {settings.model!r} has recurrent layers, whose states wrong draft "
            "tokens would destroy; choose a model without them"
        )
    reserved = draft_graph_bytes(config, draft)
    is_graphed = reserved > 0  # Graphs take one more page.
    if settings.kv_pages is not None:
        draft = draft.with_pages(settings.kv_pages + is_graphed) if is_graphed else draft
        runner = load_runner(config, launcher=launcher, draft_bytes=reserved)
    else:
        runner = load_runner(config, draft.kv_bytes_per_token * config.context_parallel_size, launcher, reserved)
        draft = draft.with_pages(runner.num_pages + is_graphed)
    chains = add_draft_graphs(config, draft, CudaCapture(draft.device), reserved) if is_graphed else None
    drafter = DraftModel(draft, runner.model_config.eos_token_ids, settings.max_prefill_tokens, chains)
    # Other ranks do not know drafts that are only on the device.
    if chains is not None and isinstance(runner, ModelRunner):
        drafter.behind, runner.drafts_after = DraftsBehind(draft, chains), drafter.after
    return runner, drafter


def draft_graph_bytes(config: EngineConfig, draft: ModelRunner) -> int:
    """Return the bytes to set aside for the draft model's graphs; 0 if it gets none."""
    if why_none(config, draft.device) is not None:
        return 0
    size = draft.kv_dtype.itemsize
    return graph_bytes(
        config,
        draft.model_config,
        size,
        draft.max_model_len,
        spreads_prompts=draft.spreads_prompts,
        is_draft_model=True,
        chains=draft_chains(config, draft.attention),
    )


def add_draft_graphs(
    config: EngineConfig, draft: ModelRunner, capture: CutCapture, reserved: int
) -> ChainGraphs | None:
    """Record the graphs of the draft model, or let its first steps record them; returns those that continue
    drafts, if there are any.
    """
    widths = draft_widths(config, is_draft_model=True)
    most = piece_tokens(config, draft.model_config, is_draft_model=True)
    kinds: list[Graphs] = [draft.add_token_graphs(config.max_running, most, widths, capture)]
    sizes = draft_chains(config, draft.attention)
    chains = draft.chain_graphs(sizes, capture) if sizes else None
    if chains is not None:
        kinds.append(chains.graphs)
    if config.cuda_graphs == "start":
        capture_all(kinds, draft.device, reserved)
    return chains
