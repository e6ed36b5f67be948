"""Fields of the device's rows, written as a step's changes are."""

from __future__ import annotations

import torch

from engine.graphs.device_rows import DeviceRows
from engine.graphs.row_assignment import RowChanges


def write_words(rows: DeviceRows, first: int, words: torch.Tensor) -> None:
    """Overwrite the words of the rows from place `first` on."""
    values = words.flatten().long().cpu()
    places = torch.arange(first, first + len(values))
    rows.write(RowChanges(0, [], torch.cat((places, values)).numpy(), len(values), False), None)
