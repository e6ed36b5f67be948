"""Fills layers that draft from hidden states with their weights, and gives them the tables of their models."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.loading.checkpoint import open_checkpoint
from engine.loading.contents import check_tensors
from engine.loading.mapped_tensors import MappedTensor
from engine.loading.target_parts import WeightTarget
from engine.loading.targets import HEAD, weight_targets
from engine.loading.weights import (
    allocate,
    plan_groups,
    prefers_input_major,
    read_groups,
    wide_parameters,
    with_head,
)
from engine.model_config.config import ModelConfig
from engine.model_parts.formats import Fp8Format
from engine.models.decoder import Decoder
from engine.models.draft_layer import DraftLayer
from engine.models.native_decoder import NativeDecoder
from engine.parallel.shard import Shard


def share_tables(
    layer: DraftLayer,
    decoder: Decoder | NativeDecoder,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give a layer the tables of its model, which one rank has whole. Those of native decoders are packed, so they
    are loaded again.
    """
    if isinstance(decoder, Decoder):
        layer.share_tables(decoder)
    else:
        load_tables(layer, decoder.config, directory, dtype, device)


def load_tables(
    layer: DraftLayer, model: ModelConfig, directory: Path, dtype: torch.dtype, device: torch.device
) -> None:
    """Load the tables of a layer's model for the layer. Raises ModelLoadError."""
    with ExitStack() as stack:
        tensors = open_checkpoint(directory, stack)
        is_tied = layer.has_own_head or with_head(model, tensors, is_needed=True).tied_embeddings
        config = replace(model, layers=(), experts=None, weight_format=None, tied_embeddings=is_tied)
        with torch.device("meta"):
            tables = Decoder(config)
        if layer.has_own_embedding:
            del tables.embed
        names = [*(() if layer.has_own_embedding else ("embed_tokens.weight",)), *(() if is_tied else (HEAD,))]
        targets = {
            name: target
            for name, target in weight_targets(config, Shard(), tensors).items()
            if name.endswith(tuple(names))
        }
        fill(tables, targets, tensors, directory, dtype, device)
    layer.share_tables(tables)


def fill(
    decoder: Decoder,
    targets: Mapping[str, WeightTarget],
    tensors: Mapping[str, MappedTensor],
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fp8: bool = False,
) -> None:
    """Allocate the parameters of a decoder on the meta device, and load the tensors of `targets` into them. For
    `fp8` see `load_decoder`.
    """
    config = decoder.config
    groups = plan_groups(decoder, targets, config, tensors, Fp8Format() if fp8 else config.weight_format, dtype)
    check_tensors(tensors, [tensor for group in groups for tensor in group.tensors], (), config.architecture)
    is_turned = device.type == "cpu" and prefers_input_major(dtype)
    allocate(decoder, partial(torch.empty, device=device), dtype, wide_parameters(targets), is_turned)
    read_groups(directory, tensors, groups, device)
