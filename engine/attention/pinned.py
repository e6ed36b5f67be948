"""Pinned memory: small copies between host and device, the only copies of this kind in steps, and host pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, cast
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")
_ALIGNED = 16
"""Alignment of packed tensors, in bytes: the kernels compiled for separate tensors accept them, too."""
_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for all CUDA contexts."""


def on_device(values: npt.NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the values as a tensor. A GPU gets them from pinned memory, so that the host need not wait.

    On a CPU nothing is copied, which takes a third of the time of calling torch for a copy.
    """
    here = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    if device.type == "cpu":
        return here
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


def on_host(values: torch.Tensor) -> torch.Tensor:
    """Return the values in the host's memory. A GPU copies them to pinned memory, and the host waits only for the
    work that computes them.
    """
    if values.device.type != "cuda":
        return values
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    here.copy_(values, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(values.device))
    there.synchronize()
    return here


def pin(memory: torch.Tensor, owner: object) -> None:
    """Pin memory that `torch.empty` has allocated, as long as `owner` exists, which must keep it until then.

    torch's allocator of pinned memory rounds up to a power of two: it would take 32 GiB for 20. Raises ValueError
    if CUDA refuses.
    """
    cudart: Any = torch.cuda.cudart()
    error = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
    if int(error):
        size = f"{memory.nbytes / 2**30:.2f} GiB"
        raise ValueError(
            f"CUDA did not pin the {size} of host memory that host_kv_gib asks for ({error}); set it to less"
        )
    # When the process ends, its memory is unpinned anyway, and CUDA may be gone before this is called.
    finalize(owner, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False


def to_device(step: T, device: torch.device) -> T:
    """Return a copy of a dataclass with all its tensors on `device`, including those of nested dataclasses. They
    are sent in one copy.

    If `device` is a CPU, return the dataclass itself, whose tensors are already there.
    """
    if device.type == "cpu":
        return step
    packed = Packed.of([*_tensors(step)], is_pinned=device.type == "cuda")
    there = packed.words.to(device, non_blocking=True)
    return cast("T", _replaced(step, iter(packed.views(there))))


class Packed(NamedTuple):
    """Tensors of the host, one after another in memory."""

    words: torch.Tensor
    """uint8 [bytes]."""
    parts: Sequence[torch.Tensor]
    """The tensors that were packed."""
    places: Sequence[int]
    """The byte at which each begins."""

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor], *, is_pinned: bool) -> Packed:
        """Copy contiguous tensors. The allocator of pinned memory knows when a copy to a device has read it."""
        places = [*accumulate([-(-part.nbytes // _ALIGNED) * _ALIGNED for part in parts], initial=0)]
        words = torch.empty(places.pop(), dtype=torch.uint8, pin_memory=is_pinned)
        target = words.numpy()
        for part, place in zip(parts, places, strict=True):
            target[place : place + part.nbytes] = part.numpy().reshape(-1).view(np.uint8)
        return cls(words, parts, places)

    def views(self, words: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as parts of a copy of `words`."""
        return [
            words[place : place + part.nbytes].view(part.dtype).view(part.shape)
            for part, place in zip(self.parts, self.places, strict=True)
        ]


def _tensors(step: Any) -> Iterator[torch.Tensor]:
    for field in fields(step):
        value = getattr(step, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif is_dataclass(value):
            yield from _tensors(value)


def _replaced(step: Any, tensors: Iterator[torch.Tensor]) -> object:
    """Return a copy of a dataclass whose tensors are replaced by `tensors`, in the order of `_tensors`."""
    moved: dict[str, object] = {}
    for field in fields(step):
        value = getattr(step, field.name)
        if isinstance(value, torch.Tensor):
            moved[field.name] = next(tensors)
        elif is_dataclass(value):
            moved[field.name] = _replaced(value, tensors)
    return replace(step, **moved)
