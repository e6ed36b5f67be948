"""Attention of many tokens of a prompt by cuDNN, which is part of torch. Triton computes everything else.

    rows      decodes | few tokens of a prompt | many tokens of a prompt
    by        [           Triton             ]   [ cuDNN               ]      in layers without a window

    of such a row, in two parts:      keys  0 ......... cut | cut ..... start | start ...... end
                                              all of them   |     as the mask of a square allows

KV is gathered from the pages into one piece, which costs a few hundredths of the time of attention. cuDNN plans
for each pair of lengths, so lengths are padded to a few values, and KV of earlier steps is cut at a multiple of
2,048: queries of the few positions from there on are zero, and their results are dropped. Padding comes last,
where a causal mask hides it from every token. Both parts' results are merged by the sums of their weights
(`engine.kernels.triton.merge`).

The calls are torch's own functions. Tests on CPUs replace them by other functions of torch, and compare results
with the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.attention.base import AttentionShape, AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import UNSCALED, KVScales
from engine.attention.other_rows import OtherRows
from engine.attention.packages import Capability, capability, misfit
from engine.attention.triton import TritonAttention

_OLDEST: Capability = (8, 0)
_OLDEST_CUDNN = 90100
"""Version 9.1, the first with kernels for Hopper GPUs that torch calls."""
_LARGEST_HEAD = 128
SHORTEST = 2048
"""Least tokens of a prompt for which attention takes so much of a step that another kernel is worth a call."""
_MULTIPLE = 512
"""Lengths are padded to multiples of this: thirteen plans up to 8,192 tokens."""
_CUT = 2048
"""KV of earlier steps is cut at multiples of this: four more plans for each 8,192 positions."""
_KERNELS = SDPBackend.CUDNN_ATTENTION


class CudnnAttention:
    """cuDNN's attention, and Triton's for the other rows."""

    name = "cudnn"
    is_capturable = captures_prompts = True
    plans_by_bounds = False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape, self._triton = shape, TritonAttention(shape)
        self.spreads_prompts = self._triton.spreads_prompts

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
        """Find the prompts with many tokens in this step. A recorded step has none."""
        prompts = [] if batch.is_bounded else _long_prompts(batch)
        if not prompts:
            return self._triton.prepare(batch, null_page)
        return CudnnStep(self._shape, self._triton, batch, null_page, prompts)


class CudnnStep:
    """One step's batch with at least one prompt of many tokens. `prompts`: rows of such prompts, in order."""

    def __init__(
        self,
        shape: AttentionShape,
        triton: TritonAttention,
        batch: AttentionBatch,
        null_page: int,
        prompts: Sequence[int],
    ) -> None:
        self.batch = batch
        self._scale, self._triton, self._null_page = shape.scale, triton, null_page
        starts = [0, *accumulate(batch.query_lens)]
        padding = null_page * shape.page_size
        self._prompts = [
            _Prompt(batch, row, slice(starts[row], starts[row + 1]), shape.page_size, padding) for row in prompts
        ]
        rest = [row for row in range(len(batch.query_lens)) if row not in set(prompts)]
        self._rest = OtherRows(batch, rest, triton, null_page) if rest else None
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
        for prompt in self._prompts:
            prompt.attend(pages, query, out, self._scale)
        if (rest := self._rest) is not None:
            out[rest.tokens] = rest.step.attend(pages, query.index_select(0, rest.tokens), None, scales)
        return out


class _Prompt:
    """The tokens of a prompt in this step, and the slots of its positions so far, padded."""

    def __init__(self, batch: AttentionBatch, row: int, tokens: slice, page_size: int, padding: int) -> None:
        self._tokens, self._count, end = tokens, tokens.stop - tokens.start, batch.kv_lens_host[row]
        self._cut = (end - self._count) // _CUT * _CUT
        self._before, self._after = end - self._count - self._cut, -(end - self._cut) % _MULTIPLE
        position = torch.arange(end, device=batch.block_table.device)
        slots = batch.block_table[row].index_select(0, position // page_size).long() * page_size
        self._slots = F.pad(slots + position % page_size, (0, self._after), value=padding)

    def attend(self, pages: torch.Tensor, query: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        """Write the result of these tokens to `out`, [N, num_heads * head_dim]."""
        own, end = query[self._tokens], self._before + self._count
        keys, values = (kind.flatten(0, 1).index_select(0, self._slots).transpose(0, 1)[None] for kind in pages)
        square = _padded(own, self._before, self._after), keys[:, :, self._cut :], values[:, :, self._cut :]
        if not self._cut:
            attended = attend_causally(*square, scale)
            out[self._tokens] = attended[0, :, self._before : end].transpose(0, 1).flatten(1)
            return
        from engine.kernels.triton.merge import merge

        earlier = _padded(own, 0, -self._count % _MULTIPLE), keys[:, :, : self._cut], values[:, :, : self._cut]
        parts = (
            attend_with_sums(*earlier, scale, is_causal=False),
            attend_with_sums(*square, scale, is_causal=True),
        )
        firsts = 0, self._before
        (first, first_sums), (second, second_sums) = (
            (part[0, :, at : at + self._count], sums[:, at : at + self._count])
            for (part, sums), at in zip(parts, firsts, strict=True)
        )
        merge(first, first_sums, second, second_sums, out[self._tokens])


def planned_lengths(longest: int) -> list[int]:
    """Return the lengths of prompts that make cuDNN plan for all prompts of up to `longest` tokens that a step
    computes whole.
    """
    return [*range(SHORTEST, longest, _MULTIPLE), longest] if longest >= SHORTEST else []


def _padded(tokens: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """Return queries [N, H, D] as [1, H, before + N + after, D], with zeros."""
    return F.pad(tokens, (0, 0, 0, 0, before, after)).transpose(0, 1)[None]


def attend_causally(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the causal attention of queries [1, H, T, D] to T keys and values."""
    with sdpa_kernel(_KERNELS):
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)


def attend_with_sums(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of queries [1, H, T, D] to keys and values [1, KV heads, K, D], and the logarithms of
    the sums of its weights before they are normalised, float32 [H, T].
    """
    attended, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, compute_log_sumexp=True, is_causal=is_causal, scale=scale
    )
    return attended, sums.view(queries.shape[1], queries.shape[2])


def _unfit(shape: AttentionShape, dtype: torch.dtype) -> str | None:
    if shape.unusual is not None:
        return f"it is not used for {shape.unusual}"
    if None not in shape.windows:
        return "it is not used for layers with a window, and all of these have one"
    if shape.kv_dtype not in (None, dtype):
        return "it does not support pages in fp8; set kv_dtype to auto"
    if shape.head_dim % 8 or shape.head_dim > _LARGEST_HEAD:
        return f"head_dim must be a multiple of 8 up to {_LARGEST_HEAD}; the model's is {shape.head_dim}"
    return None


def _long_prompts(batch: AttentionBatch) -> list[int]:
    """Return the rows that compute many positions, from the first or after many. Decode rows come before them."""
    lens = zip(batch.query_lens, batch.kv_lens_host, strict=True)
    return [
        row for row, (count, end) in enumerate(lens) if count >= SHORTEST and (count == end or end - count >= _CUT)
    ]
