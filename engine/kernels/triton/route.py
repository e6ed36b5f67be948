"""Chooses each token's experts by a softmax of its router's logits, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.launch import empty_indices, launch
from engine.kernels.triton.launch_config import power_of_2
from engine.kernels.triton.tile import start


def route(logits: torch.Tensor, per_token: int, renormalizes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `engine.models.experts.route`; among equally likely experts, the first is chosen."""
    logits = logits.contiguous()
    rows, num_experts = logits.shape
    chosen = empty_indices(logits.device, rows, per_token)
    shares = torch.empty(rows, per_token, dtype=torch.float32, device=logits.device)
    if rows:
        launch(
            _route,
            (rows,),
            logits,
            chosen,
            shares,
            num_experts,
            PER_TOKEN=per_token,
            RENORMALIZES=renormalizes,
            EXPERTS=power_of_2(num_experts),
            CHOICES=power_of_2(per_token),
            num_warps=1,
        )
    return chosen, shares


@triton.jit
def _route(
    logits,
    chosen,
    shares,
    num_experts,
    PER_TOKEN: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert, choices = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    is_expert = expert < num_experts
    scores = tl.load(logits + row * num_experts + expert, is_expert, float("-inf")).to(tl.float32)
    weights = tl.exp(scores - tl.max(scores, 0))
    share = weights / tl.sum(weights, 0)
    # A row of NaN still gets experts that exist.
    left = tl.where(is_expert, tl.where(share == share, share, 1.0), -1.0)
    experts = tl.zeros((CHOICES,), tl.int32)
    taken = tl.zeros((CHOICES,), tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        best = tl.argmax(left, 0, tie_break_left=True)
        experts = tl.where(choices == choice, best, experts)
        taken = tl.where(choices == choice, tl.sum(tl.where(expert == best, share, 0.0), 0), taken)
        left = tl.where(expert == best, -1.0, left)
    if RENORMALIZES:
        taken = taken / tl.sum(taken, 0)
    at = row * PER_TOKEN + choices
    tl.store(chosen + at, experts.to(tl.int64), choices < PER_TOKEN)
    tl.store(shares + at, taken, choices < PER_TOKEN)
