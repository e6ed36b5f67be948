"""Attention by the native CPU kernels, which read pages of any size and strides in place.

A call takes pointers to these structs:

    batch  ─▶ qo_indptr, kv_lens, block_table, slot_mapping, positions      one per step, shared by all layers
    shape  ─▶ heads, their sizes, window, scale                             one per window of the model
    pages  ─▶ keys, values (of latent KV the same address) and strides      one per layer
    query: address and stride of tokens; out, workspace: address
"""

from __future__ import annotations

import ctypes
import threading

import torch

from engine.attention.base import AttentionShape
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales
from engine.kernels import native


class NativeAttention:
    """The preferred backend on CPUs if the library was built."""

    name = "native"
    is_capturable = captures_prompts = False
    plans_by_bounds = spreads_prompts = False

    def __init__(self, shape: AttentionShape, isa: str | None = None) -> None:
        """Use the kernels of `isa`, or the best that run here; they are loaded at the first step."""
        self._shape = shape
        self._isa = isa
        self._workspaces = threading.local()

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Require a CPU, the library, a type that it supports, and a head_dim that fills vectors."""
        if device.type != "cpu":
            return f"it runs on CPUs, not on {device}"
        if shape.kv_dtype not in (None, dtype):
            return f"it supports only pages of the model's type, {dtype}, not {shape.kv_dtype}"
        if shape.head_dim % 32 or shape.value_dim % 32:
            latent = "" if shape.latent is None else f", {shape.latent} of which are values"
            return f"head_dim must be a multiple of 32; the model's is {shape.head_dim}{latent}"
        try:
            native.kernels(dtype)
        except native.NativeUnavailable as error:
            return str(error)
        return None

    def prepare(self, batch: AttentionBatch, null_page: int) -> NativeStep:
        """Wrap the batch. There is nothing to compute beforehand: the kernels follow the block table."""
        if not hasattr(self._workspaces, "own"):
            self._workspaces.own = native.Workspace()
        return NativeStep(self._shape, batch, self._workspaces.own, self._isa)


class NativeStep:
    """One step's batch for the native kernels."""

    def __init__(
        self, shape: AttentionShape, batch: AttentionBatch, workspace: native.Workspace, isa: str | None = None
    ) -> None:
        self._shape = shape
        self._isa = isa
        self.batch = batch  # The struct points to its memory.
        self.struct = native.batch_struct(batch)
        """The batch in the kernels' layout."""
        if shape.is_cascade and self.struct.num_rows > 1:
            self._groups = native.group_rows(self.struct, shape.page_size, shape.num_heads // shape.num_kv_heads)
        self._workspace = workspace
        self._calls: dict[tuple[torch.dtype, int | None], _WindowCall] = {}

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep.attend`; `scales` are ignored. Raises native.NativeUnavailable for types other
        than float32 and bfloat16.
        """
        call = self._calls.get((query.dtype, window))
        if call is None:
            kernels = native.kernels(query.dtype, self._isa)
            call = self._calls[query.dtype, window] = _WindowCall(kernels, self._shape, self.struct, window)
        out = query.new_empty(query.shape[0], self._shape.num_heads * self._shape.value_dim)
        call(pages, _with_whole_tokens(query), None if sinks is None else sinks.float(), out, self._workspace)
        return out


class _WindowCall:
    """The kernel call of all layers that share a window, with the arguments common to them."""

    def __init__(
        self, kernels: native.Kernels, shape: AttentionShape, batch: native.NativeBatch, window: int | None
    ) -> None:
        self._kernel = kernels.attention
        self._threads = torch.get_num_threads()
        self._heads = native.NativeAttentionShape(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            window=window or 0,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            scale=shape.scale,
            soft_cap=shape.soft_cap or 0.0,
        )
        self._shared = ctypes.byref(batch), ctypes.byref(self._heads)
        self._size = kernels.attention_bytes(*self._shared, self._threads)

    def __call__(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        workspace: native.Workspace,
    ) -> None:
        """`sinks`: those of the layer, float32."""
        self._heads.sinks = None if sinks is None else sinks.data_ptr()
        self._kernel(
            *self._shared,
            ctypes.byref(native.pages_struct(pages[None])),
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
            workspace.address(self._size),
            self._threads,
        )


def _with_whole_tokens(part: torch.Tensor) -> torch.Tensor:
    """Return [N, heads, head_dim] with each token's numbers contiguous."""
    return part if part.stride(2) == 1 and part.stride(1) == part.shape[2] else part.contiguous()
