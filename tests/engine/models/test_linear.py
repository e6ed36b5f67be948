"""Quantized linear layers: rounding, products and layouts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from engine.layers.linear import Fp8Linear, Int4Linear, round_fp8

CPU = torch.device("cpu")


def test_fp8_rounding_keeps_three_bits_of_each_number() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)[:, None]
    rounded, scale = round_fp8(x)
    assert rounded.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    largest = x.abs().amax(1, keepdim=True)
    error = (rounded.float() * scale[:, None] - x).abs()
    assert (error <= x.abs() / 16 + largest / 448 / 2**9).all()
    assert torch.allclose((rounded.float() * scale[:, None]).abs().amax(1), largest[:, 0])


def test_rows_of_zeros_stay_zeros_and_nan_stays_nan() -> None:
    """A row that a model computed as NaN must not become a number: its request is to fail."""
    rounded, scale = round_fp8(torch.tensor([[0.0, 0.0], [math.nan, 1.0], [1e30, -1e30]]))
    found = rounded.float() * scale[:, None]
    assert torch.equal(found[0], torch.zeros(2)) and found[1].isnan().any() and found[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_products(dtype: torch.dtype) -> None:
    """Products are those of the rounded, scaled numbers, in the type of x."""
    generator = torch.Generator().manual_seed(1)
    plain = nn.Linear(32, 24)
    with torch.no_grad():
        plain.weight.copy_(torch.randn(24, 32, generator=generator))
        plain.bias.copy_(torch.randn(24, generator=generator))
    layer = Fp8Linear(plain.to(dtype))
    layer.allocate(CPU)
    layer.put(slice(0, 8), plain.weight[:8])
    layer.put(slice(8, 24), plain.weight[8:])
    x = torch.randn(6, 32, generator=generator).to(dtype)
    rounded, scale = round_fp8(x)
    exact = (rounded.double() * scale.double()[:, None]) @ layer.dequantized().double().t() + plain.bias.double()
    found = layer(x)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= 40 * torch.finfo(dtype).eps


def test_int4_packs_the_halves_of_a_group_together() -> None:
    layer = Int4Linear(nn.Linear(64, 2, bias=False, device="meta"), 32)
    layer.allocate(CPU)
    codes = (torch.arange(128, dtype=torch.uint8).view(2, 64) * 7) % 16
    layer.put(slice(None), codes, torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.uint8))
    for output, group, j in ((0, 0, 0), (0, 1, 5), (1, 0, 15), (1, 1, 3)):
        byte = int(layer.packed[output, group * 16 + j])
        assert byte & 15 == codes[output, group * 32 + j]
        assert byte >> 4 == codes[output, group * 32 + 16 + j]
    assert torch.equal(layer.dequantized(), codes.float())


def test_int4_products_of_many_rows_are_those_of_the_widened_matrix() -> None:
    layer = Int4Linear(nn.Linear(64, 8, bias=False, device="meta"), 32)
    layer.allocate(CPU)
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (8, 64), generator=generator, dtype=torch.uint8)
    scales, zeros = torch.rand(2, 8, generator=generator), torch.full((2, 8), 7, dtype=torch.uint8)
    layer.put(slice(None), codes, scales, zeros)
    x = torch.randn(3, 64, generator=generator)
    expected = x @ ((codes.float() - 7) * scales.repeat_interleave(32, 0).t()).t()
    assert torch.allclose(layer(x), expected, atol=1e-4)
