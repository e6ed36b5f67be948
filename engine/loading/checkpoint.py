"""A model's tensors, from safetensors, GGUF files or those of torch.save."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from engine.gguf.documents import is_gguf
from engine.loading.mapped_tensors import MappedTensor, open_tensors
from engine.loading.pickled_tensors import are_pickled, open_pickled, stored_pickled
from engine.model_files.weight_files import weight_files

if TYPE_CHECKING:
    from engine.loading.weight_streaming import Stored


def open_checkpoint(model: Path, stack: ExitStack, *, is_read: bool = True) -> dict[str, MappedTensor]:
    """Map all tensors of a model, by name; `stack` closes the files. Raises ModelLoadError.

    Without `is_read`, no tensor can be read, and torch is imported only for GGUF.
    """
    if is_gguf(model):
        from engine.loading.gguf_tensors import open_gguf

        return open_gguf(model)
    files = weight_files(model)
    return open_pickled(files) if are_pickled(files) else open_tensors(files, stack, is_read=is_read)


def stored_checkpoint(model: Path) -> dict[str, Stored]:
    """Return the places of a model's tensors in its files, by name. Raises ModelLoadError."""
    from engine.loading.gguf_tensors import stored_gguf
    from engine.loading.weight_streaming import stored_tensors

    if is_gguf(model):
        return stored_gguf(model)
    files = weight_files(model)
    return stored_pickled(files) if are_pickled(files) else stored_tensors(files)
