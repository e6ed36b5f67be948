"""Attention of many tokens of a prompt to latent KV (MLA), which is expanded to each head's keys and values.

    numbers that are multiplied    absorbed (`engine/models/latent_attention.py`)    expanded
    for a token and a position     (rank + rope) + rank = 1088                       (plain + rope) + value = 320
    for a position                 -                                                 rank * (plain + value)

With the sizes of DeepSeek-V3, here for one head, fewer numbers are multiplied if a row has more than about 170
tokens, and torch has kernels for such heads, which never hold the scores of all pairs in memory. The heads of long
prompts are expanded in turn. All other rows of a step are absorbed, by the backend that is wrapped here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBackend, AttentionShape, AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales, gathered
from engine.attention.other_rows import OtherRows

MOST_ABSORBED = 512
"""Tokens of a row up to which its queries are absorbed, and of a step up to which graphs in pieces replay it."""
_POSITIONS = 1 << 17
"""Largest product of positions and heads that are expanded together. A single head may exceed it."""


class HeadsQuery(NamedTuple):
    """The queries of all heads before they are absorbed."""

    plain: torch.Tensor
    """[N, heads, plain_dim]"""
    turned: torch.Tensor
    """[N, heads, rope_dim], rotated"""

    def select(self, tokens: torch.Tensor) -> HeadsQuery:
        """Return those of some tokens."""
        return HeadsQuery(*(part.index_select(0, tokens) for part in self))


Absorbed = Callable[[AttentionStep, HeadsQuery], torch.Tensor]
"""Maps a step and its queries to the heads' values, [N, heads, value_dim]."""


class ExpandingAttention:
    """A backend that leaves rows of many tokens to torch. In graphs it is the backend itself."""

    def __init__(self, backend: AttentionBackend, shape: AttentionShape) -> None:
        self._backend, self._shape = backend, shape
        self.name, self.is_capturable = backend.name, backend.is_capturable
        self.captures_prompts, self.spreads_prompts = backend.captures_prompts, backend.spreads_prompts
        self.plans_by_bounds = backend.plans_by_bounds

    @staticmethod
    def unavailable(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Return that it cannot be chosen by itself; the backend that it wraps reports whether it can run."""
        return "it consists of another backend"

    def prepare(self, batch: AttentionBatch, null_page: int) -> AttentionStep:
        """Find the rows with many tokens."""
        if batch.is_bounded or max(batch.query_lens) <= MOST_ABSORBED:
            return self._backend.prepare(batch, null_page)
        return ExpandedStep(self._shape, self._backend, batch, null_page)


class ExpandedStep:
    """The batch of a step in which at least one row has many tokens."""

    def __init__(
        self, shape: AttentionShape, backend: AttentionBackend, batch: AttentionBatch, null_page: int
    ) -> None:
        self._backend, self.batch, self._null_page = backend, batch, null_page
        self._absorbed: AttentionStep | None = None
        others = [row for row, count in enumerate(batch.query_lens) if count <= MOST_ABSORBED]
        self._others = OtherRows(batch, others, backend, null_page) if others else None
        starts = accumulate(batch.query_lens, initial=0)
        self._prompts = [
            _Prompt(shape, batch, row, slice(start, start + count))
            for row, (start, count) in enumerate(zip(starts, batch.query_lens, strict=False))
            if count > MOST_ABSORBED
        ]

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        window: int | None,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Implement `AttentionStep.attend`, for queries that are absorbed already, of all rows."""
        if self._absorbed is None:
            self._absorbed = self._backend.prepare(self.batch, self._null_page)
        return self._absorbed.attend(pages, query, window, scales, sinks)

    def values(
        self,
        pages: torch.Tensor,
        query: HeadsQuery,
        expansion: torch.Tensor,
        scales: KVScales,
        absorbed: Absorbed,
    ) -> torch.Tensor:
        """Return the heads' values, [N, heads, value_dim]. `expansion`: [heads, plain_dim + value_dim, rank];
        `absorbed` computes the other rows.
        """
        count, num_heads, plain_dim = query.plain.shape
        out = query.plain.new_empty(count, num_heads, expansion.shape[1] - plain_dim)
        if (others := self._others) is not None:
            out[others.tokens] = absorbed(others.step, query.select(others.tokens))
        for prompt in self._prompts:
            prompt.attend(pages, query, expansion, scales, out)
        return out


class _Prompt:
    """A row of many tokens, and the slots of its positions so far."""

    def __init__(self, shape: AttentionShape, batch: AttentionBatch, row: int, tokens: slice) -> None:
        self._tokens, self._shape, page_size = tokens, shape, shape.page_size
        position = torch.arange(batch.kv_lens_host[row], device=batch.block_table.device)
        slots = batch.block_table[row].index_select(0, position // page_size).long() * page_size
        self._slots = slots + position % page_size

    def attend(
        self,
        pages: torch.Tensor,
        query: HeadsQuery,
        expansion: torch.Tensor,
        scales: KVScales,
        out: torch.Tensor,
    ) -> None:
        """Write the values of this row's tokens to `out`."""
        # These import torch's compiler, for which engines without such rows need not wait.
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right

        parts = gathered(pages, self._slots, out.dtype, scales, self._shape.latent)
        key, latent = (part.squeeze(1) for part in parts)
        turned = key[:, None, latent.shape[1] :]
        queries = torch.cat([part[self._tokens] for part in query], -1)
        (count, num_heads, head_dim), num_positions, value_dim = queries.shape, len(key), out.shape[2]
        mask = causal_lower_right(count, num_positions)
        each = max(1, _POSITIONS // num_positions)
        # Otherwise torch takes cuDNN on Hopper GPUs, which plans for each new length of a prompt.
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(kernels):
            for first in range(0, num_heads, each):
                some = slice(first, min(first + each, num_heads))
                expanded = F.linear(latent, expansion[some].flatten(0, 1)).unflatten(1, (-1, expansion.shape[1]))
                plain, values = expanded.tensor_split((-value_dim,), dim=2)
                keys = torch.cat((plain, turned.expand(-1, plain.shape[1], -1)), -1)
                # Zeros after values make them as long as keys, as torch's fastest kernel requires.
                values = F.pad(values, (0, head_dim - value_dim))
                own, keys, values = (part.transpose(0, 1)[None] for part in (queries[:, some], keys, values))
                attended = F.scaled_dot_product_attention(own, keys, values, mask, scale=self._shape.scale)
                out[self._tokens, some] = attended[0, :, :, :value_dim].transpose(0, 1)
