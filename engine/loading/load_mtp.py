"""Loads the layer for multi-token prediction (`engine/models/mtp.py`), which the loading of a model leaves out."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from engine.loading.checkpoint import open_checkpoint
from engine.loading.draft_layers import fill
from engine.loading.mtp_targets import check_mtp_tensors, mtp_config, mtp_targets
from engine.model_config.config import ModelConfig
from engine.models.mtp import MTPDecoder


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
        fill(decoder, mtp_targets(model, tensors), tensors, directory, dtype, device, fp8=fp8)
    decoder.eval()
    return decoder
