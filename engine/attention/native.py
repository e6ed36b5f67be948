"""Attention by the native kernels, for CPUs: the pages are read in place, whatever their size and strides."""

from __future__ import annotations

import ctypes
import threading

import torch

from engine.attention.base import AttentionShape
from engine.attention.batch import AttentionBatch
from engine.kernels import native


class NativeAttention:
    """The backend of choice on CPUs where the library was built."""

    name = "native"

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._workspaces = threading.local()

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """It needs a CPU, the library, a type that it has, and heads that fill vectors."""
        if device.type != "cpu":
            return f"it runs on CPUs, not on {device}"
        if shape.head_dim % 32:
            return f"head_dim is {shape.head_dim}, no multiple of 32"
        try:
            native.kernels(dtype)
        except native.Unavailable as error:
            return str(error)
        return None

    def prepare(self, batch: AttentionBatch, null_page: int) -> NativeStep:
        """Nothing is computed beforehand: the kernels follow the block table."""
        if not hasattr(self._workspaces, "own"):
            self._workspaces.own = native.Workspace()
        return NativeStep(self._shape, batch, self._workspaces.own)


class NativeStep:
    """One step's batch."""

    def __init__(self, shape: AttentionShape, batch: AttentionBatch, workspace: native.Workspace) -> None:
        self._shape = shape
        self.batch = batch
        self._struct = native.batch_struct(batch)
        self._workspace = workspace

    def forward(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """As `AttentionStep.forward` says. Raises native.Unavailable for other types than float32 and bfloat16."""
        kernels, threads = native.kernels(query.dtype), torch.get_num_threads()
        own = self._shape
        shape = native.AttentionShape(own.num_heads, own.num_kv_heads, own.head_dim, window or 0, own.scale)
        layer = native.pages_struct(pages[None])
        out = query.new_empty(query.shape[0], own.num_heads * own.head_dim)
        batch = ctypes.byref(self._struct)
        size = kernels.attention_bytes(batch, ctypes.byref(shape), layer.page_size, threads)
        tensors = [
            part if part.stride()[1:] == (own.head_dim, 1) else part.contiguous() for part in (query, key, value)
        ]
        places = [number for part in tensors for number in (part.data_ptr(), part.stride(0))]
        kernels.attention(
            batch,
            ctypes.byref(shape),
            ctypes.byref(layer),
            *places,
            out.data_ptr(),
            self._workspace.address(size),
            threads,
        )
        return out
