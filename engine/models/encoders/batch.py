"""Whole prompts in one batch: ragged for operations on tokens, in groups of similar length for attention.

tokens     [ a a a | b b b b b | c c c c ]       "ragged": no padding
groups     a a a     b b b b b                   prompts of similar length are padded to the longest of them
                     c c c c .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

_MAX_PADDED = 1.25
"""Padding increases the tokens of a group by at most this factor."""


@dataclass(slots=True)
class _Group:
    """Prompts whose attention is computed together."""

    rows: torch.Tensor
    """int64 [B, L]: the tokens of each prompt; padding points to the prompt's first token."""
    is_token: torch.Tensor | None
    """bool [B, L]; None if nothing is padded."""
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    """bool, broadcast to [B, heads, L, L], for each reach: the keys that a query sees; None: all."""

    def mask(self, reach: int | None) -> torch.Tensor | None:
        """Return the mask of layers with this reach, created at first use."""
        if reach not in self.masks:
            mask = None if self.is_token is None else self.is_token[:, None, None, :]
            length = self.rows.shape[1]
            if reach is not None and length > reach + 1:
                at = torch.arange(length, device=self.rows.device)
                near = ((at[:, None] - at).abs() <= reach)[None, None]
                mask = near if mask is None else near & mask
            self.masks[reach] = mask
        return self.masks[reach]


class EncoderBatch:
    """The prompts of one step, N tokens together."""

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        """Every prompt has at least one token."""
        self.lengths = [len(prompt) for prompt in prompts]
        flat = [token for prompt in prompts for token in prompt]
        self.token_ids = torch.tensor(flat, dtype=torch.int64).to(device)
        """int64 [N]"""
        counts = torch.tensor(self.lengths)
        firsts = counts.cumsum(0) - counts
        self.firsts = firsts.to(device)
        """int64 [prompts]: each one's first token."""
        self.positions = (torch.arange(len(flat)) - firsts.repeat_interleave(counts)).to(device)
        """int64 [N], from 0 in each prompt."""
        self.owners = torch.arange(len(prompts)).repeat_interleave(counts).to(device)
        """int64 [N]: the prompt of each token."""
        self._groups = [_group(firsts, self.lengths, rows, device) for rows in _similar(self.lengths)]

    def attend(self, qkv: torch.Tensor, reach: int | None) -> torch.Tensor:
        """Let each token attend to all of its prompt, or to those within `reach` positions of its own.

        qkv: [N, 3, heads, head_dim]; returns [N, heads * head_dim].
        """
        out = qkv.new_empty(len(qkv), qkv.shape[2] * qkv.shape[3])
        for group in self._groups:
            query, key, value = qkv[group.rows].permute(2, 0, 3, 1, 4)  # each [B, heads, L, head_dim]
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask(reach))
            rows, found = group.rows, attended.transpose(1, 2).flatten(2)
            if group.is_token is None:
                out[rows.flatten()] = found.flatten(0, 1)
            else:
                out[rows[group.is_token]] = found[group.is_token]
        return out

    def mean(self, states: torch.Tensor) -> torch.Tensor:
        """Return the mean over each prompt's tokens of [N, width], float32 [prompts, width]."""
        sums = torch.zeros(len(self.lengths), states.shape[1], device=states.device)
        sums.index_add_(0, self.owners, states.float())
        return sums / torch.tensor(self.lengths, device=states.device)[:, None]


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Return groups of prompts that may be padded to the longest of each."""
    groups: list[list[int]] = []
    total = 0
    for prompt in sorted(range(len(lengths)), key=lambda prompt: -lengths[prompt]):
        length = lengths[prompt]
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= _MAX_PADDED * (total + length):
            groups[-1].append(prompt)
            total += length
        else:
            groups.append([prompt])
            total = length
    return groups


def _group(firsts: torch.Tensor, lengths: Sequence[int], prompts: Sequence[int], device: torch.device) -> _Group:
    own = torch.tensor([lengths[prompt] for prompt in prompts])[:, None]
    steps = torch.arange(int(own.max()))
    is_token = steps < own
    rows = firsts[list(prompts)][:, None] + torch.where(is_token, steps, 0)
    return _Group(rows.to(device), None if bool(is_token.all()) else is_token.to(device))
