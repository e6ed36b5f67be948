"""Attention by cuDNN, which torch brings, to prompts that begin at position 0. Triton attends to everything else.

    rows      decodes | rest of a prompt | short prompt | prompt at position 0
    by        [           Triton                       ]  [ cuDNN             ]    in layers without a window

Such a prompt's KV was written in this step, so its slots are gathered into one piece, which costs a few hundredths
of what attending does. cuDNN plans for each length, so lengths are padded to a few: padding comes last, where a
causal mask hides it from every token.

The call is torch's own function; that it computes what the reference does is tested with torch's other kernels
behind it. It has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.attention.base import AttentionShape, AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales
from engine.attention.packages import Capability, capability, misfit
from engine.attention.pinned import on_device
from engine.attention.triton import TritonAttention

_OLDEST: Capability = (8, 0)
_OLDEST_CUDNN = 90100
"""Version 9.1, the first whose kernels for Hopper GPUs torch calls."""
_LARGEST_HEAD = 128
SHORTEST = 2048
"""Tokens of a prompt from which on attention takes so much of a step that another kernel is worth a call."""
_MULTIPLE = 512
"""Lengths are padded to multiples of this: thirteen plans up to 8,192 tokens."""
_KERNELS = SDPBackend.CUDNN_ATTENTION


class CudnnAttention:
    """cuDNN's attention, and Triton's for what cuDNN is not asked."""

    name = "cudnn"
    is_capturable = captures_prompts = True
    plans_by_bounds = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape, self._triton = shape, TritonAttention(shape)

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Require layers without a window, plain 16-bit heads, a GPU, cuDNN, and Triton for the rest."""
        if reason := misfit(dtype, device) or _unfit(shape, dtype):
            return reason
        gpu = capability(device)
        if gpu is not None:
            if gpu < _OLDEST:
                return f"it needs compute capability 8.0 or more; this GPU has {gpu[0]}.{gpu[1]}"
            version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
            if version is None or version < _OLDEST_CUDNN:
                return f"it needs cuDNN 9.1 or later; torch {torch.__version__} has {version or 'none'}"
        if reason := TritonAttention.unavailable(shape, dtype, device):
            return f"Triton would compute its other rows: {reason}"
        return None

    def prepare(self, batch: AttentionBatch, null_page: int) -> AttentionStep:
        """Find the prompts that begin here. A recorded step has none."""
        wholes = [] if batch.is_bounded else _whole_prompts(batch)
        if not wholes:
            return self._triton.prepare(batch, null_page)
        return CudnnStep(self._shape, self._triton, batch, null_page, wholes)


class CudnnStep:
    """One step's batch with at least one prompt that begins in it. `wholes`: rows of such prompts, in order."""

    def __init__(
        self,
        shape: AttentionShape,
        triton: TritonAttention,
        batch: AttentionBatch,
        null_page: int,
        wholes: Sequence[int],
    ) -> None:
        self.batch = batch
        self._scale, self._triton, self._null_page = shape.scale, triton, null_page
        starts = [0, *accumulate(batch.query_lens)]
        padding = null_page * shape.page_size
        self._wholes = [_Whole(batch, slice(starts[row], starts[row + 1]), padding) for row in wholes]
        rest = [row for row in range(len(batch.query_lens)) if row not in set(wholes)]
        self._rest = _Rest(batch, rest, starts, triton, null_page) if rest else None
        self._windowed: AttentionStep | None = None

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep.attend`; pages have the queries' type."""
        if window is not None:
            self._windowed = self._windowed or self._triton.prepare(self.batch, self._null_page)
            return self._windowed.attend(pages, query, window, scales, sinks)
        out = query.new_empty(len(query), query.shape[1] * query.shape[2])
        for whole in self._wholes:
            whole.attend(pages, query, out, self._scale)
        if self._rest is not None:
            self._rest.attend(pages, query, out, scales)
        return out


class _Whole:
    """A prompt all of whose positions so far are in this step: tokens of the batch, and their slots, padded."""

    def __init__(self, batch: AttentionBatch, tokens: slice, padding: int) -> None:
        self._tokens = tokens
        self._missing = -(tokens.stop - tokens.start) % _MULTIPLE
        self._slots = F.pad(batch.slot_mapping[tokens], (0, self._missing), value=padding)

    def attend(self, pages: torch.Tensor, query: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        """Write the result of these tokens to `out`, [N, num_heads * head_dim]."""
        own = query[self._tokens]
        padded = F.pad(own, (0, 0, 0, 0, 0, self._missing))
        keys, values = (kind.flatten(0, 1).index_select(0, self._slots) for kind in pages)
        queries, keys, values = (part.transpose(0, 1)[None] for part in (padded, keys, values))  # [1, H, T, D]
        with sdpa_kernel(_KERNELS):
            attended = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
            )
        out[self._tokens] = attended[0].transpose(0, 1)[: len(own)].flatten(1)


class _Rest:
    """The other rows, as a batch of their own."""

    def __init__(
        self,
        batch: AttentionBatch,
        rows: Sequence[int],
        starts: Sequence[int],
        triton: TritonAttention,
        null_page: int,
    ) -> None:
        """`starts`: of each row of the batch, its first token."""
        device = batch.kv_lens.device
        lens = [batch.query_lens[row] for row in rows]
        at = on_device(np.array(rows, dtype=np.int64), device)
        tokens = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
        self._tokens = on_device(tokens, device)
        own = replace(
            batch,
            query_lens=lens,
            kv_lens_host=[batch.kv_lens_host[row] for row in rows],
            qo_indptr=on_device(np.cumsum([0, *lens], dtype=np.int32), device),
            kv_lens=batch.kv_lens.index_select(0, at),
            block_table=batch.block_table.index_select(0, at),
            slot_mapping=batch.slot_mapping.index_select(0, self._tokens),
            positions=batch.positions.index_select(0, self._tokens),
            more_tables=None,
            more_slots=None,
        )
        self._step = triton.prepare(own, null_page)

    def attend(self, pages: torch.Tensor, query: torch.Tensor, out: torch.Tensor, scales: KVScales) -> None:
        """Write the result of these tokens to `out`."""
        out[self._tokens] = self._step.attend(pages, query.index_select(0, self._tokens), None, scales)


def _unfit(shape: AttentionShape, dtype: torch.dtype) -> str | None:
    if shape.unusual is not None:
        return f"it is not used for {shape.unusual}"
    if None not in shape.windows:
        return "it is not used for layers with a window, and all of these have one"
    if shape.kv_dtype not in (None, dtype):
        return "it takes no pages in fp8; set kv_dtype to auto"
    if shape.head_dim % 8 or shape.head_dim > _LARGEST_HEAD:
        return f"head_dim must be a multiple of 8 up to {_LARGEST_HEAD}; the model's is {shape.head_dim}"
    return None


def _whole_prompts(batch: AttentionBatch) -> list[int]:
    """Return the rows that compute all of their positions, if these are many. Decode rows come before them."""
    lens = zip(batch.query_lens, batch.kv_lens_host, strict=True)
    return [row for row, (count, end) in enumerate(lens) if count == end and count >= SHORTEST]
