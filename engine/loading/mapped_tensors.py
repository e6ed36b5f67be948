"""A checkpoint's tensors as views of its files, which are mapped into memory and released tensor by tensor.

    files ── open_tensors: mapped, not read ──▶ read: a view ──▶ copied or packed ──▶ release: memory given back

Pages read from a mapping stay in the process's memory until it is closed. Copying a whole checkpoint would thus
hold the weights twice, unless each tensor is released after its copy. The system's file cache keeps the data.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from engine.base.errors import ModelLoadError
from engine.base.files import checked, open_regular

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One tensor of an open checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The type in safetensors' spelling: "F32", "BF16", ..."""
    file: Any

    def read(self) -> torch.Tensor:
        """Return a read-only view of the file, valid while the file is open. Raises ModelLoadError."""
        try:
            tensor: torch.Tensor = self.file.get_tensor(self.name)
        except SafetensorError as error:
            raise ModelLoadError(f"tensor {self.name} cannot be read: {error}") from error
        # Without this advice, the system reads ahead only some hundred KiB of an uncached file.
        _advise(tensor, "MADV_WILLNEED")
        return tensor


def open_tensors(paths: Sequence[Path], stack: ExitStack, *, is_read: bool = True) -> dict[str, MappedTensor]:
    """Open all tensors of safetensors files, by name; `stack` closes the files. Raises ModelLoadError.

    Without `is_read`, no tensor can be read, and torch is not imported.
    """
    framework = "pt" if is_read else "numpy"
    tensors: dict[str, MappedTensor] = {}
    for path in paths:
        try:
            checked(path)
            file = stack.enter_context(safe_open(str(path), framework=framework, device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{path} is not a complete safetensors file ({error}); download the model again"
            ) from error
        for name in file.keys():  # noqa: SIM118 (no mapping)
            entry = file.get_slice(name)
            tensors[name] = MappedTensor(name, tuple(entry.get_shape()), entry.get_dtype(), file)
    return tensors


class MappedFile:
    """A file in memory, for as long as a tensor refers to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with open_regular(path) as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}; download the model again") from error

    def view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return numbers of the file as a tensor that must not be written. Raises ModelLoadError."""
        import torch

        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        if offset + count * dtype.itemsize > len(self._content):
            raise ModelLoadError(f"{self._path} has become shorter than its header says; download it again")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._content, dtype=dtype, count=count, offset=offset).view(shape)


def release(tensor: torch.Tensor) -> None:
    """Free the memory behind a tensor that `MappedTensor.read` returned and that is not used again.

    Its first and last page stay, because they may hold neighbouring tensors.
    """
    _advise(tensor, "MADV_DONTNEED")


def _advise(tensor: torch.Tensor, advice: str) -> None:
    """Advise the system about a tensor's whole pages; does nothing on systems without such a call."""
    madvise, number = _madvise(), getattr(mmap, advice, None)
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and number is not None and end > first:
        madvise(first, end - first, number)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
