"""Whether CUDA graphs are used, an estimate of their memory, and recording them at an engine's start."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from engine.attention.base import AttentionBackend
from engine.config import EngineConfig
from engine.graphs.step_graphs import DecodeSizes, contexts_up_to, sizes_up_to
from engine.models.config import ModelConfig

logger = logging.getLogger(__name__)

_NODES_PER_LAYER = 12
_NODES_BESIDE = 30
_NODE_BYTES = 16 * 1024
"""Driver memory per kernel of a graph: a safe estimate, logged beside the actual amount."""
_BYTES_BESIDE = 64 * 2**20
"""Memory for libraries' workspaces and attention's layouts."""


class Graphs(Protocol):
    """Graphs of all sizes of some kinds of steps."""

    @property
    def num_graphs(self) -> int:
        """How many there are."""
        ...

    def capture_all(self) -> None:
        """Record them (`StepGraphs.capture_all`)."""
        ...


def why_not(
    config: EngineConfig,
    attention: AttentionBackend,
    device: torch.device,
    model: ModelConfig | None = None,
) -> str | None:
    """Return why steps are not replayed as graphs; None when they are."""
    if config.cuda_graphs == "off":
        return "cuda_graphs is off"
    if device.type != "cuda":
        return f"they are for GPUs, not for {device}"
    if model is not None and model.delta_net is not None:
        return "its gated delta nets are computed in torch, by rows of different kinds"
    if not attention.is_capturable:
        return f"attention by {attention.name} needs the host in each step"
    experts = None if model is None else model.experts
    if experts is not None and (experts.are_apart or experts.clamp is not None):
        return "its experts are computed one after another, for which the host has to know the tokens of each"
    return None


def graph_bytes(
    config: EngineConfig, model: ModelConfig, element_bytes: int, max_model_len: int, *, is_planned: bool = False
) -> int:
    """Estimate the bytes of GPU memory to reserve for all graphs and the rows that they read.

    `is_planned`: whether there are some for short rows (`contexts_up_to`). Graphs share one pool, sized by the
    largest: one layer's tensors, and the logits.
    """
    rows = sizes_up_to(config.max_running)
    sizes = DecodeSizes(rows, contexts_up_to(max_model_len, is_planned=is_planned)).all
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = 4 * model.hidden_size + heads + 3 * model.intermediate_size
    logits = model.vocab_size * (element_bytes + 4)
    tables = 4 * (8 + -(-max_model_len // config.page_size))
    nodes = len(sizes) * (model.num_layers * _NODES_PER_LAYER + _NODES_BESIDE)
    return rows[-1] * (layer * element_bytes + logits + tables) + nodes * _NODE_BYTES + _BYTES_BESIDE


def capture_all(graphs: Graphs, device: torch.device, reserved: int) -> None:
    """Record all graphs; a warning says when the device cannot record such steps.

    `reserved` is the number of bytes set aside for them. Raises ValueError when they do not fit.
    """
    before = torch.cuda.mem_get_info(device)[0]
    try:
        graphs.capture_all()
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"CUDA graphs do not fit: {before / 2**20:.0f} MiB of GPU memory were free for {graphs.num_graphs} of "
            f"them, {reserved / 2**20:.0f} MiB were expected; lower kv_pages, kv_memory_share or max_running, or "
            'set cuda_graphs to "off"'
        ) from error
    taken = before - torch.cuda.mem_get_info(device)[0]
    logger.info(
        "%d CUDA graphs took %.0f MiB, %.0f MiB were expected", graphs.num_graphs, taken / 2**20, reserved / 2**20
    )
