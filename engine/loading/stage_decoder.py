"""Reduces a decoder to one stage's layers: before its memory is allocated, and after its weights are loaded.

planned   layers 0 .. 20, named as in the files       for checks of all tensors
loading   layers 10 .. 20, the others are empty       still with their numbers in the model
loaded    layers 0 .. 10
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.loading.target_parts import WeightTarget
from engine.models.decoder import Decoder
from engine.parallel.stage import Stage


def own_targets(decoder: Decoder, stage: Stage, targets: Mapping[str, WeightTarget]) -> dict[str, WeightTarget]:
    """Return the targets of the tensors that a stage loads: of its layers, the final norm and, on the first stage,
    the tables. Later stages also embed tokens if layers have inputs of their own.
    """
    shared = ("norm.",) if decoder.config.inputs is None else ("norm.", "embed.", "inputs.")
    num_layers = len(decoder.layers)
    return {
        name: target
        for name, target in targets.items()
        if stage.has(target.parameter, num_layers) or target.parameter.startswith(shared)
    }


def leave_out_others(decoder: Decoder, stage: Stage) -> None:
    """Empty the layers of other stages, and the tables that a stage does not need."""
    for layer in set(range(len(decoder.layers))) - set(stage.layers(len(decoder.layers))):
        decoder.layers[layer] = torch.nn.Module()
    if not stage.is_first:
        decoder.lm_head = None
        if decoder.config.inputs is None:
            hidden_size = decoder.config.hidden_size
            decoder.embed = torch.nn.Embedding(0, hidden_size, _weight=torch.empty(0, hidden_size, device="meta"))


def keep_own(decoder: Decoder, stage: Stage) -> None:
    """Keep only the stage's layers; the decoder's `config` describes only these afterwards."""
    own = stage.layers(len(decoder.layers))
    decoder.layers = decoder.layers[own.start : own.stop]
    decoder.config, decoder.first_layer = stage.of(decoder.config), own.start
