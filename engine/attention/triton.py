"""The `triton` backend for GPUs, and its requirements. `engine/attention/triton_step.py` computes its steps."""

from __future__ import annotations

from importlib.util import find_spec
from os import environ
from typing import TYPE_CHECKING

import torch

from engine.attention.base import AttentionShape
from engine.attention.batch import AttentionBatch
from engine.kernels.triton.kv_heads import KVHeads

if TYPE_CHECKING:
    from engine.attention.triton_step import TritonStep

_MOST_GROUP = 32
"""Most query heads of a KV head with which a program has the queries of two rows, for their shared prefix."""
_MIN_CAPABILITY = (7, 5)
_MIN_CAPABILITY_FP8 = (8, 9)
_FP8_ARCHITECTURES = ("gfx95", "gfx12")
"""AMD architectures with float8_e4m3fn; earlier ones have another float8 type."""


class TritonAttention:
    """The preferred backend on GPUs. In Triton's interpreter (TRITON_INTERPRET=1) it runs anywhere, for tests."""

    name = "triton"
    is_capturable = captures_prompts = True
    plans_by_bounds = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        heads = KVHeads.of(*shape.heads)
        has_room = heads.group <= min(_MOST_GROUP, heads.most_rows // 2)
        self.spreads_prompts = shape.is_cascade and shape.windows == {None} and has_room

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Require a GPU on which its programs fit, Triton, and for 8-bit pages a GPU that supports float8."""
        if device.type != "cuda" and environ.get("TRITON_INTERPRET") != "1":
            return f"it runs on GPUs, not on {device}"
        if find_spec("triton") is None:
            return "Triton is not installed; CUDA builds of torch include it, with others: pip install triton"
        has_gpu = device.type == "cuda" and torch.cuda.is_available()
        return _missing(shape, dtype, device) if has_gpu else None

    def prepare(self, batch: AttentionBatch, null_page: int) -> TritonStep:
        """Wrap the batch. The common layout depends on the queries' type, so the first layer makes it."""
        from engine.attention.triton_step import TritonStep  # Import Triton only if it is used.

        return TritonStep(self._shape, batch)


def _missing(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return what a GPU lacks for this backend; None if it lacks nothing."""
    from engine.kernels.triton.decode import decode_config
    from engine.kernels.triton.launch_config import shared_memory

    facts = torch.cuda.get_device_properties(device)
    is_fp8 = shape.kv_dtype == torch.float8_e4m3fn
    needed = _MIN_CAPABILITY_FP8 if is_fp8 else _MIN_CAPABILITY
    if torch.version.hip is not None:
        if is_fp8 and not facts.gcnArchName.startswith(_FP8_ARCHITECTURES):
            return f"{facts.name} does not support float8_e4m3fn; set kv_dtype to auto"
    elif (facts.major, facts.minor) < needed:
        for_what = "pages in fp8 need" if is_fp8 else "Triton needs"
        return (
            f"{facts.name} has compute capability {facts.major}.{facts.minor}, {for_what} {needed[0]}.{needed[1]}"
        )
    if decode_config(KVHeads.of(*shape.heads), dtype.itemsize, device) is None:
        return (
            f"heads of {shape.head_dim} in {dtype} do not fit in the {shared_memory(device) // 1024} KiB "
            f"of shared memory of {facts.name}"
        )
    return None
