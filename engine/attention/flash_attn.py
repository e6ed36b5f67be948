"""Attention by FlashAttention, with the first of its packages that is installed. All of them read pages in place.

Decode rows take one call, which splits each row's KV over the GPU, and prefill rows another:

    tokens  [ a | b | c | d d d d | e e e ]
    calls   [  decode   |     prefill     ]     both with the same window, causal from the bottom right corner

The calls are tested with doubles of the packages' documented functions; none of them has run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.base import AttentionShape
from engine.attention.batch import AttentionBatch
from engine.attention.flash_packages import Call, FoundPackage, find_package
from engine.attention.kv_pages import UNSCALED, KVScales
from engine.attention.packages import misfit


class FlashAttention:
    """FlashAttention 2 and 3 (Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608)."""

    name = "flash_attn"
    is_capturable = captures_prompts = True
    plans_by_bounds = True
    spreads_prompts = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._found: FoundPackage | None = None  # Set at the first step, when the device is known.

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Require a CUDA GPU, 16-bit numbers, and one of the packages, with pages and heads that it supports."""
        if shape.unusual is not None:
            return f"it is not used for {shape.unusual}"
        if shape.kv_dtype not in (None, dtype):
            return "it supports fp8 pages only with fp8 queries; set kv_dtype to auto"
        found = misfit(dtype, device) or find_package(shape, device)
        return found if isinstance(found, str) else None

    def prepare(self, batch: AttentionBatch, null_page: int) -> FlashStep:
        """Build the arguments that both calls share. Raises RuntimeError if no package fits."""
        if self._found is None:
            found = find_package(self._shape, batch.block_table.device)
            if isinstance(found, str):
                raise RuntimeError(f"attention: flash_attn cannot run: {found}")
            self._found = found
        return FlashStep(self._shape, batch, self._found)


class FlashStep:
    """One step's batch for FlashAttention."""

    def __init__(self, shape: AttentionShape, batch: AttentionBatch, found: FoundPackage) -> None:
        self.batch = batch
        package, num_rows = found.package, len(batch.query_lens)
        bounds = ((package.decode, 0, batch.num_decodes), (package.prefill, batch.num_decodes, num_rows))
        self._parts = [
            _Part(found, call, _RowArguments(shape, batch, first, last))
            for call, first, last in bounds
            if first < last
        ]

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep.attend`; pages have the queries' type."""
        keys, values = pages
        if all(part.takes_out for part in self._parts):
            attended = query.new_empty(query.shape)
            for part in self._parts:
                part(query, keys, values, window, attended)
        else:
            parts = [part(query, keys, values, window, None) for part in self._parts]
            attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.reshape(query.shape[0], -1).contiguous()


class _Part:
    """One call per layer, with the arguments that all layers share."""

    def __init__(self, found: FoundPackage, call: Call, rows: _RowArguments) -> None:
        self.takes_out = call.takes_out
        self._function = found.function(call)
        self._is_ragged = call.is_ragged
        self._tokens = rows.tokens
        shared = {name: rows.arguments[name]() for name in call.arguments if name in rows.arguments}
        self._shared = {**shared, **found.extra}

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        window: int | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend for the part's tokens: [tokens, num_heads, head_dim], written to the batch's `out` if given."""
        seen = (-1, -1) if window is None else (window - 1, 0)  # positions before and after a query's own
        shared = self._shared if out is None else {**self._shared, "out": self._shaped(out)}
        attended: torch.Tensor = self._function(self._shaped(query), keys, values, window_size=seen, **shared)
        return attended if self._is_ragged else attended[:, 0]

    def _shaped(self, tokens: torch.Tensor) -> torch.Tensor:
        own = tokens[self._tokens]
        return own if self._is_ragged else own[:, None]


class _RowArguments:
    """Rows first .. last of a batch, as arguments of the packages' functions."""

    def __init__(self, shape: AttentionShape, batch: AttentionBatch, first: int, last: int) -> None:
        lens, kv_lens = batch.query_lens[first:last], batch.kv_lens[first:last]
        self.tokens = slice(first, first + sum(lens))  # rows before these have one token each
        self.arguments: dict[str, Callable[[], Any]] = {
            "block_table": lambda: batch.block_table[first:last],
            "page_table": lambda: batch.block_table[first:last],
            "cache_seqlens": lambda: kv_lens,
            "seqused_k": lambda: kv_lens,
            "cu_seqlens_k": lambda: F.pad(kv_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            "cu_seqlens_q": lambda: batch.qo_indptr[first : last + 1] - first,
            "max_seqlen_q": lambda: max(lens),
            "max_seqlen_k": lambda: max(batch.kv_lens_host[first:last]),
            "softmax_scale": lambda: shape.scale,
            "causal": lambda: True,
        }
        """How each argument is computed, by its name."""
