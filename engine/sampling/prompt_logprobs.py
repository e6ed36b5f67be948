"""Scores prompts: the log-probability and rank of each prompt token, and the top tokens at its position.

Logits of a whole prompt chunk would take gigabytes: 2048 tokens of a vocabulary of 150k are 1.2 GB in float32.
They are computed one slice at a time, and only the packed records are kept:

    hidden [N, H] ── rows that score ──▶ [ slice | slice | ... ] ── logits, log-softmax ──▶ [ rows, 2 + 2 * top ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.attention.pinned import on_device, on_host
from engine.values.logprobs import PackedLogprobs
from engine.values.plan import Chunk

SLICE_BYTES = 64 * 2**20
"""Bytes of float32 logits held at a time. Their log-softmax takes as many, comparing them a quarter."""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Consecutive tokens of one prompt that a step can score."""

    request_id: str
    row: int
    """Row of the step's hidden states that predicts the first of `targets`; the rows of the others follow."""
    targets: Sequence[int]
    """The prompt's own tokens."""
    start: int
    """Position of the first target in the prompt."""
    num_top: int
    """Number of alternatives to report."""


def spans_to_score(chunks: Sequence[Chunk]) -> list[PromptSpan]:
    """Return the parts of the chunks' prompts that the step can score and that were not reported yet.

    tokens:        [ computed already | this chunk ]
    predicted by it                     [ one behind ]     those from `num_prompt_reported` to the prompt's end
    """
    if not any(chunk.request.sampling.prompt_logprobs is not None for chunk in chunks):
        return []
    wanted, row = [], 0
    for chunk in chunks:
        request, num_top = chunk.request, chunk.request.sampling.prompt_logprobs
        first = max(chunk.start + 1, request.num_prompt_reported)
        end = min(chunk.start + chunk.num_tokens + 1, request.num_prompt)
        if num_top is not None and first < end:
            targets = [*request.prompt_ids[first:end]]
            wanted.append(PromptSpan(request.request_id, row + first - 1 - chunk.start, targets, first, num_top))
        row += chunk.num_tokens
    return wanted


def score(
    logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    wanted: Sequence[PromptSpan],
    vocab_size: int,
    slice_bytes: int,
) -> dict[str, PackedLogprobs]:
    """Return the records of each span by request id; spans may ask for different numbers of alternatives.

    logits: maps hidden states [R, H] to float32 [R, vocab_size]; hidden: [N, H], the step's. No more than
    `slice_bytes` of logits exist at any time, except for a single row. There is one copy to the host.
    """
    if not wanted:
        return {}
    rows = _on(hidden.device, chain.from_iterable(range(w.row, w.row + len(w.targets)) for w in wanted))
    targets = _on(hidden.device, chain.from_iterable(w.targets for w in wanted))
    num_top = min(max(w.num_top for w in wanted), vocab_size)
    packed = torch.empty(len(rows), 2 + 2 * num_top, dtype=torch.int32, device=hidden.device)
    step = max(1, slice_bytes // (4 * vocab_size))
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        _pack(torch.log_softmax(logits(hidden[rows[part]]), dim=-1), targets[part], packed[part])
    records = on_host(packed).numpy().astype("<i4", copy=False)
    borders = np.cumsum([len(w.targets) for w in wanted])[:-1]
    return {
        w.request_id: PackedLogprobs(w.start, min(w.num_top, num_top), own[:, : 2 + 2 * w.num_top].tobytes())
        for w, own in zip(wanted, np.split(records, borders), strict=True)
    }


def _pack(logprobs: torch.Tensor, targets: torch.Tensor, out: torch.Tensor) -> None:
    """Write the records of `logprobs`, float32 [R, V], to `out`, int32 [R, 2 + 2 * num_top]."""
    own = logprobs.gather(1, targets[:, None])
    best = logprobs.topk(out.shape[1] // 2 - 1, dim=-1)
    out[:, 0:1] = own.view(torch.int32)
    out[:, 1] = (logprobs > own).sum(-1) + 1
    out[:, 2::2] = best.indices
    out[:, 3::2] = best.values.view(torch.int32)


def _on(device: torch.device, numbers: chain[int]) -> torch.Tensor:
    """Copy the numbers to the device, int64 [n]."""
    return on_device(np.fromiter(numbers, dtype=np.int64), device)
