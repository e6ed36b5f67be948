"""Describes, for `raydix info`, the attention backends and CPU kernels that would be used here and on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.attention.base import RAN_ON_GPUS, AttentionShape, preferred, sorted_out
from engine.attention.native import NativeAttention
from engine.kernels import native
from engine.model_config.config import ModelConfig
from engine.models import native_delta_net
from engine.models.native_decoder import unsupported

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def attention_text(shape: AttentionShape, dtype: torch.dtype, device: str) -> str:
    """Return the choice of `attention: auto`, and why, then a line for each other one: usable, or why not."""
    usable, refused = sorted_out(shape, dtype, torch.device(device))
    others = [f"not {name}: {reason}" for name, reason in refused.items()]
    if not usable:
        return "\n".join(("none", *others))
    taken, why = preferred(usable, torch.device(device))
    untried = set() if device == "cpu" else set(usable) - RAN_ON_GPUS
    others += [
        f"{name}: when asked for by name" + (", as it has not run on a GPU yet" if name in untried else "")
        for name in usable
        if name not in taken.split(",")
    ]
    is_of_gpu = device == "cuda" and torch.cuda.is_available()
    return "\n".join((f"{taken} ({why})" if is_of_gpu else taken, *others))


def kernels_text(facts: ModelConfig | None, dtype: torch.dtype) -> str:
    """Return the instruction set in use and those that are built, threads and huge pages, or why there are no
    kernels, or why they compute only the model's attention or none of it.
    """
    try:
        used, built = native.kernels(dtype).isa, native.built_isas(dtype)
    except native.NativeUnavailable as error:
        return f"none: {error}"
    missing = native.build_log()
    parts = (
        *([] if facts is None else _limits(facts, dtype)),
        f"{used} of {', '.join(built)}" + (f" ({missing})" if missing else ""),
        f"{torch.get_num_threads()} threads",
        f"huge pages: {_huge_pages()}",
    )
    return "; ".join(parts)


def why_not_native(facts: ModelConfig, dtype: torch.dtype, device: str) -> str | None:
    """Return why the native kernels do not compute the whole model here, so that its blocks are widened; None if
    they do.
    """
    if device != "cpu":
        return "no kernel for GPUs computes with them"
    try:
        native.kernels(dtype)
    except native.NativeUnavailable as error:
        return str(error)
    limits = _limits(facts, dtype)
    return f"the native kernels compute {'; '.join(limits)}" if limits else None


def _limits(facts: ModelConfig, dtype: torch.dtype) -> list[str]:
    """Return the parts of the model that the kernels compute, if not all, and why torch computes the rest."""
    reasons = [unsupported(facts)]
    if reasons == [None]:
        return []
    cpu, kinds = torch.device("cpu"), facts.kinds_of_heads.values()
    shapes = [AttentionShape.of(heads, windows, page_size=1) for heads, windows in kinds]
    refused = [NativeAttention.unavailable(shape, dtype, cpu) for shape in shapes]
    parts = ["attention" if not any(refused) else "attention of some layers"] if None in refused else []
    reasons += refused
    if facts.delta_net is not None:
        reasons.append(not_recurrent := native_delta_net.unsupported(facts.delta_net, dtype))
        parts += ["recurrent layers"] if not_recurrent is None else []
    why = "; ".join(dict.fromkeys(reason for reason in reasons if reason))
    return [f"{' and '.join(parts) + ' only' if parts else 'nothing of this model'} ({why})"]


def _huge_pages() -> str:
    """Return the system's setting: always, madvise (only for memory that requests them) or never."""
    try:
        return _HUGE_PAGES.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        return "none"
