"""How attention would be computed on this machine and on a GPU, and by which kernels: for `raydix info`."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.attention.base import AttentionShape, consider
from engine.kernels import native
from engine.models.config import ModelConfig
from engine.models.native_decoder import unsupported

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def attention_text(shape: AttentionShape, dtype: torch.dtype, device: str) -> str:
    """The backend that `attention: auto` takes, then a line for each other: why not, or that it would run too."""
    taken, others = "none", []
    for name, backend in consider(shape, dtype, torch.device(device)):
        if isinstance(backend, str):
            others.append(f"not {name}: {backend}")
        elif taken == "none":
            taken = name
        else:
            others.append(f"{name}: when asked for by name")
    return "\n".join((taken, *others))


def kernels_text(facts: ModelConfig | None, dtype: torch.dtype) -> str:
    """The instruction set that is used and those that are built, threads, huge pages; or why there is nothing, or
    why only attention of the model is computed by them.
    """
    try:
        used, built = native.kernels(dtype).isa, native.built_isas(dtype)
    except native.NativeUnavailable as error:
        return f"none: {error}"
    missing, reason = native.build_log(), None if facts is None else unsupported(facts)
    parts = (
        *([f"attention alone ({reason})"] if reason else []),
        f"{used} of {', '.join(built)}" + (f" ({missing})" if missing else ""),
        f"{torch.get_num_threads()} threads",
        f"huge pages: {_huge_pages()}",
    )
    return "; ".join(parts)


def _huge_pages() -> str:
    """The system's setting: always, madvise (for memory that asks for them) or never."""
    try:
        return _HUGE_PAGES.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        return "none"
