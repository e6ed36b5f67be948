"""A model's tensors, from safetensors or GGUF files, and those of a layer that drafts, also from torch.save's."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from engine.gguf.documents import is_gguf
from engine.loading.gguf_tensors import open_gguf, stored_gguf
from engine.loading.mapped_tensors import MappedTensor, open_tensors
from engine.loading.pickled_tensors import is_pickled, open_pickled, stored_pickled
from engine.loading.weight_streaming import Stored, stored_tensors
from engine.model_files.weight_files import weight_files


def open_checkpoint(model: Path, stack: ExitStack) -> dict[str, MappedTensor]:
    """Map all tensors of a model, by name; `stack` closes the files. Raises ModelLoadError."""
    if is_pickled(model):
        return open_pickled(model)
    return open_gguf(model) if is_gguf(model) else open_tensors(weight_files(model), stack)


def stored_checkpoint(model: Path) -> dict[str, Stored]:
    """Return the places of a model's tensors in its files, by name. Raises ModelLoadError."""
    if is_pickled(model):
        return stored_pickled(model)
    return stored_gguf(model) if is_gguf(model) else stored_tensors(weight_files(model))
