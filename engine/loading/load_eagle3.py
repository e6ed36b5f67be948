"""Loads the layer of an EAGLE-3 checkpoint (`engine/models/eagle3.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from engine.base.errors import ModelLoadError
from engine.loading.checkpoint import open_checkpoint
from engine.loading.draft_layers import fill
from engine.loading.eagle3_targets import DRAFTED, MASK, TABLE, eagle3_targets
from engine.loading.mapped_tensors import MappedTensor
from engine.model_config.eagle3 import Eagle3Config
from engine.models.eagle3 import Eagle3Decoder


def load_eagle3(directory: Path, config: Eagle3Config, dtype: torch.dtype, device: torch.device) -> Eagle3Decoder:
    """Load the layer, without tables of the model. Raises ModelLoadError."""
    with ExitStack() as stack:
        tensors = open_checkpoint(directory, stack)
        targets = eagle3_targets(config, tensors)
        with torch.device("meta"):
            decoder = Eagle3Decoder(config, has_own_embedding=TABLE in tensors)
        fill(decoder, targets, tensors, directory, dtype, device)
        drafted = _drafted(tensors, config)
        decoder.drafted = None if drafted is None else drafted.to(device)
    decoder.eval()
    return decoder


def _drafted(tensors: Mapping[str, MappedTensor], config: Eagle3Config) -> torch.Tensor | None:
    """Return the model's ids of the tokens that can be drafted, int64, by their draft ids; None if both are equal.
    Raises ModelLoadError.
    """
    if DRAFTED not in tensors:
        return None
    own = torch.arange(config.layer.vocab_size)
    drafted = own + tensors[DRAFTED].read().long()
    there = torch.zeros(config.vocab_size, dtype=torch.bool)
    if int(drafted.min()) >= 0 and int(drafted.max()) < len(there):
        there[drafted] = True
    if int(there.sum()) < len(drafted):
        raise ModelLoadError(
            f"speculation.model: {DRAFTED} must give each draft token the id of another one of the model's "
            f"{config.vocab_size} tokens; download it again"
        )
    if MASK in tensors and not torch.equal(tensors[MASK].read().bool(), there):
        raise ModelLoadError(
            f"speculation.model: {DRAFTED} and {MASK} name different tokens that can be drafted; download it again"
        )
    return None if torch.equal(drafted, torch.arange(len(there))) else drafted
