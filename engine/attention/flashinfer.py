"""Attention by FlashInfer: one wrapper for decode rows and one for prefill rows, planned once per step.

A plan assigns parts of rows to thread blocks. It is made on the host, from the batch's host-side metadata. Layers
with another window need their own plan, and thus their own wrapper.

    row     pages [3 9 4] (5 of page 4 used)   pages [7]
    plan    kv_indptr [0 3 4]   kv_indices [3 9 4 7]   last_page_len [5 ...]

The calls are tested with doubles of the wrappers' documented methods; they have not run on a GPU yet.
Sources: flashinfer/decode.py and prefill.py of flashinfer-ai/flashinfer (Ye et al. 2025, arXiv:2501.01005).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.attention.base import AttentionShape
from engine.attention.batch import AttentionBatch
from engine.attention.copy_streams import fence
from engine.attention.kv_pages import FP8, UNSCALED, KVScales
from engine.attention.packages import Capability, capability, imported, misfit, trtllm_misfit
from engine.attention.pinned import on_device

_DECODE, _PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
_HEAD_DIMS = (64, 128, 256)
_OLDEST: Capability = (8, 0)
_BLACKWELL = 10
_WORKSPACE_BYTES = 128 << 20
"""Size FlashInfer recommends for the partial results of rows whose KV is split."""
_GROUP_FOR_TENSOR_CORES = 4
"""Query heads per KV head from which decode uses tensor cores: they are faster, and some groups need them."""


class FlashInferAttention:
    """FlashInfer's paged attention. It is compiled at first use unless its kernel cache is installed."""

    name = "flashinfer"
    is_capturable = captures_prompts = False
    plans_by_bounds = spreads_prompts = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._wrappers: dict[tuple[str, int | None, torch.dtype], Any] = {}
        self._workspace: torch.Tensor | None = None

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Require a CUDA GPU, 16-bit queries, a head size that it has kernels for, and the package."""
        if reason := misfit(dtype, device):
            return reason
        if (gpu := capability(device)) is not None and gpu < _OLDEST:
            return f"it needs compute capability 8.0 or more; this GPU has {gpu[0]}.{gpu[1]}"
        if shape.unusual is not None:
            return f"it is not used for {shape.unusual}"
        if shape.head_dim not in _HEAD_DIMS:
            return f"head_dim must be one of {', '.join(map(str, _HEAD_DIMS))}; the model's is {shape.head_dim}"
        module = imported("flashinfer")
        if module == "":
            return "flashinfer is not installed: pip install 'raydix[flashinfer]'"
        if isinstance(module, str):
            return module
        missing = [name for name in (_DECODE, _PREFILL) if not hasattr(module, name)]
        return f"it has no {missing[0]}: pip install -U 'raydix[flashinfer]'" if missing else None

    def prepare(self, batch: AttentionBatch, null_page: int) -> FlashInferStep:
        """Lay out each row's pages. Plans are made at the first layer of a window, when the type of its pages is
        known.

        A wrapper holds one plan and sends it to the GPU from its own pinned memory, so the previous step's plan
        must no longer be in use. So this waits for the steps launched before.
        """
        fence(batch.block_table.device)()
        return FlashInferStep(self, self._shape, batch)

    def wrapper(self, name: str, window: int | None, kv_type: torch.dtype, device: torch.device) -> Any:
        """Return the wrapper for such rows and layers, made on first use. A wrapper keeps the kernels of its first
        plan, so pages of another type need another wrapper.

        All wrappers share one workspace, because their kernels run in turn.
        """
        key = name, window, kv_type
        if key not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            options: dict[str, Any] = {}
            if name == _PREFILL and self._takes_trtllm(device):
                options["backend"] = "trtllm-gen"
            if name == _DECODE:
                group = self._shape.num_heads // self._shape.num_kv_heads
                options["use_tensor_cores"] = group >= _GROUP_FOR_TENSOR_CORES
            module = imported("flashinfer")
            self._wrappers[key] = getattr(module, name)(self._workspace, "NHD", **options)
        return self._wrappers[key]

    def _takes_trtllm(self, device: torch.device) -> bool:
        """Whether TensorRT-LLM's kernels compute prompts. By default, FlashInfer uses those of FlashAttention-3 on
        Hopper GPUs, and elsewhere those of FlashAttention-2.
        """
        gpu, shape = capability(device), self._shape
        return gpu is not None and gpu[0] == _BLACKWELL and trtllm_misfit(shape.page_size, shape.kv_dtype) is None


class FlashInferStep:
    """One step's batch for FlashInfer."""

    def __init__(self, backend: FlashInferAttention, shape: AttentionShape, batch: AttentionBatch) -> None:
        self.batch = batch
        self._backend = backend
        self._shape = shape
        decodes, rows = batch.num_decodes, len(batch.query_lens)
        self._decodes = _PlannedRows(batch, 0, decodes, shape.page_size) if decodes else None
        self._prefills = _PlannedRows(batch, decodes, rows, shape.page_size) if decodes < rows else None
        self._planned: dict[int | None, list[tuple[_PlannedRows, Any]]] = {}

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep.attend`."""
        if window not in self._planned:
            self._planned[window] = self._plan(window, query.dtype, pages.dtype)
        keys, values = pages
        factors = {"k_scale": scales[0], "v_scale": scales[1]} if pages.dtype == FP8 else {}
        out = query.new_empty(query.shape)
        for rows, wrapper in self._planned[window]:
            wrapper.run(query[rows.tokens], (keys, values), out=out[rows.tokens], **factors)
        return out.flatten(1)

    def _plan(
        self, window: int | None, query_type: torch.dtype, kv_type: torch.dtype
    ) -> list[tuple[_PlannedRows, Any]]:
        shape, device = self._shape, self.batch.block_table.device
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
        options = {
            "window_left": -1 if window is None else window - 1,
            "sm_scale": shape.scale,
            "q_data_type": query_type,
            "kv_data_type": kv_type,
        }
        planned = []
        if (rows := self._decodes) is not None:
            wrapper = self._backend.wrapper(_DECODE, window, kv_type, device)
            wrapper.plan(rows.kv_indptr, rows.kv_indices, rows.last_page_len, *heads, **options)
            planned.append((rows, wrapper))
        if (rows := self._prefills) is not None:
            wrapper = self._backend.wrapper(_PREFILL, window, kv_type, device)
            pages = (rows.kv_indptr, rows.kv_indices, rows.last_page_len)
            wrapper.plan(rows.qo_indptr, *pages, *heads, causal=True, **options)
            planned.append((rows, wrapper))
        return planned


class _PlannedRows:
    """Rows first .. last of a batch in FlashInfer's layout: int32, on the host except for the page ids."""

    def __init__(self, batch: AttentionBatch, first: int, last: int, page_size: int) -> None:
        kv_lens = np.array(batch.kv_lens_host[first:last])
        counts = (kv_lens - 1) // page_size + 1
        kv_indptr = _indptr(counts)
        table = batch.block_table
        # Places of each row's pages in the flattened table: the page ids themselves stay on the device.
        starts = np.arange(first, last) * table.shape[1] - kv_indptr[:-1]
        places = np.repeat(starts, counts) + np.arange(kv_indptr[-1])
        qo_indptr = _indptr(np.array(batch.query_lens[first:last]))

        self.tokens = slice(first, first + int(qo_indptr[-1]))  # rows before these have one token each
        self.qo_indptr = torch.from_numpy(qo_indptr)
        self.kv_indptr = torch.from_numpy(kv_indptr)
        self.kv_indices = table.flatten().index_select(0, on_device(places, table.device))
        self.last_page_len = torch.from_numpy(((kv_lens - 1) % page_size + 1).astype(np.int32))


def _indptr(counts: Any) -> Any:
    """int32 [R + 1]: 0, then the cumulated counts."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
