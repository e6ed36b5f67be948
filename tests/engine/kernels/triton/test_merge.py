"""The kernel that merges attention to two parts of a row's keys, compared with float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from engine.kernels.triton.merge import merge
from tests.engine.support.devices import DEVICE


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize(("heads", "tokens", "size"), [(1, 1, 16), (3, 17, 80), (2, 40, 128)])
def test_parts_are_weighed_by_their_sums(
    heads: int, tokens: int, size: int, dtype: torch.dtype, most: float
) -> None:
    """Sums lie far apart, and parts are slices of what was computed, with other strides each."""
    generator = torch.Generator().manual_seed(tokens)
    first = torch.randn(heads, tokens + 3, size, generator=generator).to(DEVICE, dtype)[:, 3:]
    second = torch.randn(tokens, heads, size, generator=generator).to(DEVICE, dtype).transpose(0, 1)
    first_sums = 20 * torch.randn(heads, tokens + 5, generator=generator).to(DEVICE)[:, :tokens]
    second_sums = 20 * torch.randn(heads, tokens, generator=generator).to(DEVICE)
    out = torch.full((tokens + 2, heads * size), 7.0, dtype=dtype, device=DEVICE)
    merge(first, first_sums, second, second_sums, out[1:-1])
    total = torch.logaddexp(first_sums.double(), second_sums.double())
    weights = [(sums.double() - total).exp()[..., None] for sums in (first_sums, second_sums)]
    expected = (first.double() * weights[0] + second.double() * weights[1]).transpose(0, 1).flatten(1)
    assert (out[1:-1].double() - expected).abs().max() < most
    assert (out[[0, -1]] == 7.0).all()
