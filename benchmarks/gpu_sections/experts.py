"""A layer's mixture of experts: whether it is right, and its time beside what its weights or its products need."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu_sections.limits import Rates
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import recorded_seconds_of
from engine.models.experts import experts_mlp

_MOST = 0.04
"""Largest error beside a size of 1: sums are float32, and operands, what is between and results bfloat16."""


class _Mixture(NamedTuple):
    num_experts: int
    per_token: int
    hidden: int
    inner: int
    tokens: tuple[int, ...]
    """Tokens of the batches: few and many per expert, as each size of tiles has its own kernels."""


_QWEN3_30B = _Mixture(128, 8, 2048, 768, (1, 8, 64, 700, 4096))
_TINY = _Mixture(6, 2, 48, 40, (1, 9))


def experts(device: torch.device, rates: Rates, is_tiny: bool) -> Iterator[Measurement]:
    """A line for each batch, of a layer of Qwen3-30B-A3B. Each token goes to experts drawn at random."""
    from engine.kernels.triton import grouped_gemm

    mixture = _TINY if is_tiny else _QWEN3_30B
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        """Products with rows of these are around 1."""
        values = torch.randn(shape, generator=generator, device=device)
        values /= shape[-1] ** 0.5
        return values.to(torch.bfloat16)

    gate_up = random(mixture.num_experts, 2 * mixture.inner, mixture.hidden)
    down = random(mixture.num_experts, mixture.hidden, mixture.inner)
    for tokens in mixture.tokens:
        x = random(tokens, mixture.hidden) * mixture.hidden**0.5
        logits = torch.randn(tokens, mixture.num_experts, generator=generator, device=device)
        shares, chosen = logits.softmax(-1).topk(mixture.per_token)
        shares /= shares.sum(-1, keepdim=True)
        expected = experts_mlp(x.float(), chosen, shares, gate_up.float(), down.float(), 0)
        found = grouped_gemm.experts_mlp(x, chosen, shares, gate_up, down, 0)
        off = (found.float() - expected).abs() / expected.abs().clamp(min=1)
        error = float(off.nan_to_num(nan=torch.inf).max())
        call = partial(grouped_gemm.experts_mlp, x, chosen, shares, gate_up, down, 0)
        seconds = recorded_seconds_of([call], device)  # Its weights are more than any cache holds.
        weights = 3 * mixture.hidden * mixture.inner
        reading = len(chosen.unique()) * weights * x.element_size() / rates.bandwidth
        limit = max(reading, 2 * chosen.numel() * weights / rates.matmul)
        yield Measurement(
            f"experts, {tokens} token{'s' * (tokens > 1)}",
            by="triton",
            ms=1000 * seconds,
            limit_share=limit / seconds,
            passed=error <= _MOST,
            error=error,
            note=f"{mixture.per_token} of {mixture.num_experts}; error {error:.4f}, at most {_MOST}",
        )
