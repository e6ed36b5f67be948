"""Loads the layer for multi-token prediction (`engine/models/mtp.py`), which the loading of a model leaves out."""

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
from engine.loading.mtp_targets import check_mtp_tensors, mtp_config, mtp_targets
from engine.loading.target_parts import WeightTarget
from engine.loading.targets import HEAD, weight_targets
from engine.loading.weights import allocate, plan_groups, prefers_input_major, read_groups, wide_parameters
from engine.model_config.config import ModelConfig
from engine.model_parts.formats import Fp8Format
from engine.models.decoder import Decoder
from engine.models.mtp import MTPDecoder
from engine.models.native_decoder import NativeDecoder
from engine.parallel.shard import Shard


def load_mtp(
    directory: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device, *, fp8: bool = False
) -> MTPDecoder:
    """Load the MTP layer of a model, without tables. `fp8` as for `load_decoder`. Raises ModelLoadError."""
    model = model.rounded() if fp8 else model
    with torch.device("meta"):
        decoder = MTPDecoder(mtp_config(model))
    with ExitStack() as stack:
        tensors = open_checkpoint(directory, stack)
        check_mtp_tensors(model, tensors, directory)
        _fill(decoder, mtp_targets(model, tensors), tensors, directory, dtype, device, fp8=fp8)
    return decoder.eval()


def share_tables(
    mtp: MTPDecoder, decoder: Decoder | NativeDecoder, directory: Path, dtype: torch.dtype, device: torch.device
) -> None:
    """Give an MTP layer the tables of its model. Those of native decoders are packed, so they are loaded again."""
    if isinstance(decoder, Decoder):
        mtp.share_tables(decoder)
        return
    config = replace(decoder.config, layers=(), experts=None, weight_format=None)
    with torch.device("meta"):
        tables = Decoder(config)
    with ExitStack() as stack:
        tensors = open_checkpoint(directory, stack)
        targets = {
            name: target
            for name, target in weight_targets(config, Shard(), tensors).items()
            if name.endswith(("embed_tokens.weight", HEAD))
        }
        _fill(tables, targets, tensors, directory, dtype, device)
    mtp.share_tables(tables)


def _fill(
    decoder: Decoder,
    targets: Mapping[str, WeightTarget],
    tensors: Mapping[str, MappedTensor],
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fp8: bool = False,
) -> None:
    """Allocate the parameters of a decoder on the meta device, and load the tensors of `targets` into them."""
    config = decoder.config
    groups = plan_groups(decoder, targets, config, tensors, Fp8Format() if fp8 else config.weight_format, dtype)
    check_tensors(tensors, [tensor for group in groups for tensor in group.tensors], (), config.architecture)
    is_turned = device.type == "cpu" and prefers_input_major(dtype)
    allocate(decoder, partial(torch.empty, device=device), dtype, wide_parameters(targets), is_turned)
    read_groups(directory, tensors, groups, device)
