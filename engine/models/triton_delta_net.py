"""The heads of a gated delta net by Triton's kernels, on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.state_slots import LayerState
from engine.kernels.delta_pieces import StatePieces
from engine.kernels.triton import delta_net
from engine.kernels.triton.delta_prompts import advance_rows, convolve
from engine.models.native_delta_net import DeltaRun
from engine.models.torch_delta_net import TorchDeltaHeads


class TritonDeltaHeads(TorchDeltaHeads):
    """A layer's heads, with all rows in the same launches."""

    def _advance_slots(self, slots: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return delta_net.advance_slots(slots, *inputs)

    def run(
        self, runs: Sequence[DeltaRun], state: LayerState, pieces: StatePieces | None = None
    ) -> list[torch.Tensor]:
        """Implement `TorchDeltaHeads.run`."""
        assert pieces is not None, "there is a row"
        mixed = _joined([run.inputs.mixed for run in runs])
        # Copies even if there is one row: kernels are compiled for tensors that begin at a multiple of 16 bytes.
        decay, strength = (torch.cat([run.inputs[part] for run in runs]) for part in (1, 2))
        convolved, kept = convolve(mixed, self._conv, state.inputs, pieces)
        state.inputs.index_copy_(0, pieces.kept[:, 2], kept)
        found = advance_rows(state.matrices, convolved, decay, strength, pieces)
        rows = found.split([len(run.inputs.mixed) for run in runs])
        own = [row[run.num_replayed :] for row, run in zip(rows, runs, strict=True)]
        gated = self._gated(_joined(own), _joined([run.inputs.z for run in runs]))
        return [*gated.split([len(row) for row in own])]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])
