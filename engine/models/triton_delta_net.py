"""The heads of a gated delta net by Triton's kernels, on GPUs."""

from __future__ import annotations

import torch

from engine.attention.state_batch import StateBatch
from engine.attention.state_slots import LayerState
from engine.kernels.triton.delta_net import advance_decodes, convolve_decodes, gated, strengths
from engine.kernels.triton.delta_prompts import advance_rows, convolve
from engine.models.native_delta_net import DeltaInputs
from engine.models.torch_delta_net import TorchDeltaHeads


class TritonDeltaHeads(TorchDeltaHeads):
    """A layer's heads, with all rows in the same launches."""

    strengths = staticmethod(strengths)

    def _advance_plain(
        self, inputs: DeltaInputs, state: LayerState, sources: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        convolved = convolve_decodes(inputs.mixed, self._conv, state.inputs, sources, targets)
        return advance_decodes(state.matrices, sources, targets, convolved, inputs.decay, inputs.strength)

    def _advance_rows(self, inputs: DeltaInputs, state: LayerState, batch: StateBatch) -> torch.Tensor:
        pieces = batch.pieces
        assert pieces is not None, "there is a row"
        convolved, kept = convolve(inputs.mixed, self._conv, state.inputs, pieces)
        state.inputs.index_copy_(0, pieces.kept[:, 2], kept)
        return advance_rows(state.matrices, convolved, inputs.decay, inputs.strength, pieces)

    def gated(self, found: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Implement `TorchDeltaHeads.gated`."""
        return gated(found, z, self._norm, self._eps)
