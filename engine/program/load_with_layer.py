"""Loads a model and a layer that drafts from its hidden states, with KV pages for both."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.attention.base import AttentionShape, choose_backend
from engine.attention.kv_pages import KVPages
from engine.graphs.chain_graphs import ChainGraphs, ChainSize
from engine.graphs.setup import capture_all, draft_chains, draft_widths, graph_bytes, piece_tokens, why_not
from engine.graphs.step_graphs import CudaCapture
from engine.loading.devices import device_named, dtype_of
from engine.loading.draft_layers import load_tables, share_tables
from engine.loading.load_eagle3 import load_eagle3
from engine.loading.load_mtp import load_mtp
from engine.loading.model_settings import max_model_len
from engine.loading.mtp_targets import check_mtp
from engine.loading.warm_up import compile_kernels, warm_steps, warm_up
from engine.model_config.config import ModelConfig
from engine.model_config.eagle3 import Eagle3Config
from engine.model_files.model_directory import resolve_model
from engine.models.draft_layer import DraftLayer
from engine.ranks.load_runner import load_runner
from engine.runner.drafts_behind import DraftsBehind
from engine.runner.hidden_states import HiddenStates
from engine.runner.layer_drafter import LayerDrafter, LayerRunner
from engine.runner.model_runner import ModelRunner
from engine.settings.config import EngineConfig

if TYPE_CHECKING:
    from engine.ranks.launcher import WorkerLauncher
    from engine.ranks.runner import ParallelRunner

logger = logging.getLogger(__name__)


def load_with_layer(
    config: EngineConfig, launcher: WorkerLauncher | None = None
) -> tuple[ModelRunner | ParallelRunner, LayerDrafter]:
    """Load the model that `config` names, and the layer that its `speculation` names. Raises ModelLoadError,
    ValueError.

    If several ranks share the model, only the first rank has the layer, whole and with tables of its own.

    The layer's weights are loaded first, so that KV gets the memory that both leave free. If the layer has as many
    pages as the model, a page counts with the memory of both.
    """
    settings = config.speculation
    assert settings is not None
    directory, device = resolve_model(config.model, config.model_revision), device_named(config.device)
    model = ModelConfig.from_directory(directory)
    check_mtp(config, model)
    limit = max_model_len(config, model)
    model, dtype = model.for_context(limit).on(device.type), dtype_of(config.dtype, model.dtype, device)
    decoder, inner_layers, most = _load_layer(config, directory, model, limit, dtype, device)
    if config.num_ranks > 1:
        load_tables(decoder, model, directory, dtype, device)
    layer, windows = decoder.config, decoder.config.windows
    shape = AttentionShape.of(layer.attention, windows, config.page_tokens, dtype, is_cascade=False)
    attention = choose_backend(config.attention, shape, dtype, device)
    pages = KVPages.of(layer, 1, config.page_tokens, dtype, device)
    drafting = LayerRunner(layer, decoder, attention, pages)
    drafting.max_model_len = most
    is_graphed = why_not(config, attention, device) is None
    sizes = draft_chains(config, attention) if is_graphed else []
    graphs = graph_bytes(config, layer, dtype.itemsize, most, chains=sizes, is_layer=True) if is_graphed else 0
    num_kept = max(settings.max_prefill_tokens, 1 + settings.max_drafts)  # All draft tokens may be wrong.
    kept = config.max_running * num_kept * layer.hidden_size
    # Graphs keep the states of inner layers, and twice as much while they compute.
    graphed = 3 * (config.max_running + piece_tokens(config, model)) if device.type == "cuda" else 0
    draft_bytes = graphs + (kept + graphed * len(inner_layers) * model.hidden_size) * dtype.itemsize
    if settings.kv_pages is not None:
        runner = load_runner(config, 0, launcher, draft_bytes, inner_layers)
        num_pages = settings.kv_pages
    else:
        per_token = drafting.kv_bytes_per_token * config.context_parallel_size
        runner = load_runner(config, per_token, launcher, draft_bytes, inner_layers)
        num_pages = runner.num_pages
    first = runner if isinstance(runner, ModelRunner) else runner.first
    hidden = HiddenStates(num_kept, lambda found: decoder.states_of(first.decoder, found))
    first.on_hidden = hidden.add
    if config.num_ranks == 1:
        share_tables(decoder, first.decoder, directory, dtype, device)
    drafting = drafting.with_pages(num_pages + is_graphed)  # Graphs take one more page.
    steps = [*warm_steps(min(config.max_step_tokens, settings.max_prefill_tokens), most, config.page_tokens)]
    compile_kernels(drafting, iter(steps), device)
    chains = _add_graphs(config, drafting, sizes, graphs) if is_graphed else None
    warm_up(drafting, iter(steps), device)
    drafter = LayerDrafter(drafting, hidden, model.eos_token_ids, settings.max_prefill_tokens, chains)
    if chains is not None and isinstance(runner, ModelRunner):
        drafter.behind, runner.drafts_after = DraftsBehind(drafting, chains, hidden.last), drafter.after
    return runner, drafter


def _add_graphs(
    config: EngineConfig, drafting: LayerRunner, sizes: Sequence[ChainSize], reserved: int
) -> ChainGraphs:
    """Record the layer's graphs, or let its first steps record them; returns those that draw drafts."""
    capture = CudaCapture(drafting.device)
    of_steps = drafting.add_token_graphs(config.max_running, 0, draft_widths(config), capture)
    chains = drafting.chain_graphs(sizes, capture)
    if config.cuda_graphs == "start":
        capture_all([of_steps, chains.graphs], drafting.device, reserved)
    return chains


def _load_layer(
    config: EngineConfig, directory: Path, model: ModelConfig, limit: int, dtype: torch.dtype, device: torch.device
) -> tuple[DraftLayer, tuple[int, ...], int]:
    """Load the layer. Returns it, the model's `Decoder.inner_layers` that it reads, and its longest context."""
    settings = config.speculation
    assert settings is not None
    if settings.model is None:
        return load_mtp(directory, model, dtype, device, fp8=config.quantization == "fp8"), (), limit
    files = resolve_model(settings.model)
    eagle = Eagle3Config.from_directory(files, config.ignored_config_keys)
    eagle.check_fits(model)
    inner, longest = eagle.inner_layers(model), min(limit, eagle.layer.max_position_embeddings)
    eagle = replace(eagle, layer=eagle.layer.for_context(longest))
    logger.info(
        "%s drafts from states of the model after %s of its %d layers, and for requests of up to %d tokens",
        settings.model,
        ", ".join(map(str, inner)),
        model.num_layers,
        longest,
    )
    return load_eagle3(files, eagle, dtype, device), inner, longest
