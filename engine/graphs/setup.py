"""Decides whether CUDA graphs are used, estimates their memory, and records them at an engine's start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from engine.attention.base import AttentionBackend
from engine.attention.expanded import MOST_ABSORBED
from engine.graphs.chain_graphs import ChainSize, chain_sizes
from engine.graphs.draft_graphs import draft_sizes
from engine.graphs.piece_graphs import piece_sizes
from engine.graphs.row_assignment import TABLE
from engine.graphs.spread_graphs import LONGEST, spread_sizes
from engine.graphs.step_graphs import DecodeSizes, contexts_up_to, sizes_up_to
from engine.model_config.config import ModelConfig
from engine.settings.config import EngineConfig

logger = logging.getLogger(__name__)

_SIZES_CHOSEN = (512, 768, 1024, 1536, 2048)
_LAUNCHES_OF_A_LAYER_S = 0.5e-3
"""Seconds in which the host launches a layer's kernels, measured on the host of an H100."""
_RATE = 5e14
"""Operations per second of an H100 in the products of a prompt, about two thirds of its peak."""
_NODES_PER_LAYER = 12
_NODES_OF_EXPERTS = 12
"""Kernels of a mixture in addition to the layer's: the router, the choice of experts and the experts."""
_NODES_OF_DELTA_NETS = 24
"""Kernels of a gated delta net in addition to those of attention."""
_NODES_BESIDE = 40
_NODE_BYTES = 16 * 1024
"""Driver memory per kernel of a graph: a safe estimate, logged with the actual amount."""
_PIECE_BYTES = 32 * 1024
"""The same for each graph of a step in pieces, in addition to its kernels."""
_PARTS_OF_ROW, _PARTS_OF_GPU = 5, 1280
"""Partial results of decodes' attention: for each row of the largest graph, and for 160 multiprocessors."""
_BYTES_BESIDE = 64 * 2**20
"""Memory for libraries' workspaces and attention's layouts, and for the partial results of heads that are not
latent."""


class Graphs(Protocol):
    """Graphs of all sizes of some kinds of steps."""

    @property
    def num_graphs(self) -> int:
        """Number of graphs."""

    def capture_all(self) -> None:
        """Record them (`StepGraphs.capture_all`)."""


def why_not(config: EngineConfig, attention: AttentionBackend, device: torch.device) -> str | None:
    """Return why steps are not replayed as graphs, including attention; None if they are."""
    if (reason := why_none(config, device)) is not None:
        return reason
    return None if attention.is_capturable else f"attention by {attention.name} needs the host in each step"


def why_none(config: EngineConfig, device: torch.device) -> str | None:
    """Return why no steps are replayed, not even between attentions; None if some are."""
    if config.cuda_graphs == "off":
        return "cuda_graphs is off"
    return None if device.type == "cuda" else f"CUDA graphs are for GPUs, not for {device}"


def draft_widths(config: EngineConfig, *, is_draft_model: bool = False) -> tuple[int, ...]:
    """Return the widths of rows for which graphs with draft tokens are made: of the model that verifies them, and
    of a layer, which computes them after it; or of a draft model, which computes one or two tokens for each.
    """
    if config.speculation is None:
        return ()
    widths = {2, config.speculation.max_drafts + 1}
    return tuple(sorted(widths | {1} if is_draft_model else widths))


def draft_chains(config: EngineConfig, attention: AttentionBackend) -> list[ChainSize]:
    """Return the sizes of the graphs with which a model, or a layer, continues drafts."""
    if config.speculation is None or not attention.is_capturable:
        return []
    return chain_sizes(config.max_running, config.speculation.max_drafts)


def piece_tokens(config: EngineConfig, model: ModelConfig, *, is_draft_model: bool = False) -> int:
    """Return the most tokens of a step with prompts that is replayed, as a whole or in pieces; 0 in stages of
    a pipeline, and if ranks divide KV (`engine/parallel/context_attention.py`), for which prompts need the host.
    With latent KV, at most as many as are absorbed (`engine/attention/expanded.py`).
    """
    if max(config.context_parallel_size, config.pipeline_parallel_size) > 1 and not is_draft_model:
        return 0
    chosen = _tokens_while_launching(model) if config.graph_tokens is None else config.graph_tokens
    if model.attention.latent is not None:
        chosen = min(chosen, MOST_ABSORBED)
    return min(chosen, config.max_step_tokens)


def _tokens_while_launching(model: ModelConfig) -> int:
    """Return about how many tokens, of `_SIZES_CHOSEN`, a GPU computes while the host launches a step's kernels
    one by one. For more tokens, graphs would save nothing.
    """
    tables = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    per_token = 2 * (model.active_parameters - tables)
    found = model.num_layers * _LAUNCHES_OF_A_LAYER_S * _RATE / per_token
    return max([_SIZES_CHOSEN[0], *(size for size in _SIZES_CHOSEN if size <= found)])


def graph_bytes(
    config: EngineConfig,
    model: ModelConfig,
    element_bytes: int,
    max_model_len: int,
    *,
    is_planned: bool = False,
    spreads_prompts: bool = False,
    is_draft_model: bool = False,
    chains: Sequence[ChainSize] = (),
    is_layer: bool = False,
    num_groups: int = 1,
) -> int:
    """Estimate the bytes of GPU memory to reserve for all graphs and their inputs.

    `is_planned`: whether some are for short rows (`contexts_up_to`); `spreads_prompts`: whether in some each token
    is a row. A draft model has no graphs of plain decodes, and a layer that drafts (`is_layer`) none of prompts
    either. `chains`: the sizes of graphs that continue drafts. `num_groups`: groups of layers with page tables of
    their own. Graphs share one pool, sized by the largest: one layer's tensors, and the logits.
    """
    rows = sizes_up_to(config.max_running)
    decodes = DecodeSizes(rows, contexts_up_to(max_model_len, is_planned=is_planned)).all
    widths = draft_widths(config, is_draft_model=is_draft_model)
    drafts = draft_sizes(widths, config.max_running)
    most = 0 if is_layer else piece_tokens(config, model, is_draft_model=is_draft_model)
    spreads = spread_sizes(most) if spreads_prompts and model.delta_net is None else []
    pieces = piece_sizes(most, above=LONGEST if spreads else 0)
    num_graphs = len(drafts) + len(spreads) + len(pieces) + (0 if is_draft_model or is_layer else len(decodes))
    num_graphs += sum(size.calls for size in chains)  # Each call has as many kernels as another graph.
    num_whole = max([rows[-1], *spreads, *(size.num_tokens for size in drafts)])
    num_tokens = max([num_whole, *pieces])

    kinds = [kind for kind, _ in model.kinds_of_heads.values()]
    heads = sum(2 * (kind.num_heads + kind.num_kv_heads) * kind.head_dim for kind in kinds)
    layer = 5 * model.hidden_size + 2 * heads + 3 * model.intermediate_size
    num_nodes = model.num_layers * _NODES_PER_LAYER + _NODES_BESIDE
    if model.experts is not None:
        layer += model.experts.per_token * (model.experts.intermediate_size + model.hidden_size)
        num_nodes += len(model.experts.layers) * _NODES_OF_EXPERTS
    if model.inputs is not None:
        layer += model.num_layers * model.inputs.size
    states = 0
    if (net := model.delta_net) is not None:
        states = 4 * num_whole * (net.kernel * net.channels + net.values)
        states = max([states, *(size * (2 * net.channels + 14 * net.values) for size in pieces)])
        num_nodes += model.num_recurrent_layers * _NODES_OF_DELTA_NETS
    logits = model.vocab_size * (element_bytes + 4 + 3)  # masks take bytes, not bits, while they are applied
    num_parts = _PARTS_OF_ROW * rows[-1] + _PARTS_OF_GPU
    parts = 4 * num_parts * model.attention.num_heads * (model.attention.latent or 0)
    tables = 4 * (TABLE + num_groups * -(-max_model_len // config.page_tokens))
    host = num_graphs * num_nodes * _NODE_BYTES + len(pieces) * (model.num_layers + 1) * _PIECE_BYTES
    num_tables = rows[-1] + sum(max([0, *(size.rows for size in kind)]) for kind in (drafts, chains))
    inputs = rows[-1] * logits + (num_tables + max([0, *spreads])) * tables
    return (num_tokens * layer + states) * element_bytes + inputs + parts + host + _BYTES_BESIDE


def capture_all(kinds: Sequence[Graphs], device: torch.device, reserved: int) -> None:
    """Record all graphs; log a warning if the device cannot record such steps.

    `reserved` is the number of bytes set aside for them. Raises ValueError when they do not fit.
    """
    num_graphs = sum(graphs.num_graphs for graphs in kinds)
    torch.cuda.empty_cache()  # Recording does so, too, and would otherwise seem to free memory.
    before = torch.cuda.mem_get_info(device)[0]
    try:
        for graphs in kinds:
            graphs.capture_all()
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"CUDA graphs do not fit: {before / 2**20:.0f} MiB of GPU memory were free for {num_graphs} of "
            f"them, {reserved / 2**20:.0f} MiB were expected; lower kv_pages, kv_memory_share, max_running or "
            'graph_tokens, or set cuda_graphs to "off"'
        ) from error
    taken = before - torch.cuda.mem_get_info(device)[0]
    logger.info(
        "%d CUDA graphs took %.0f MiB, %.0f MiB were expected", num_graphs, taken / 2**20, reserved / 2**20
    )
