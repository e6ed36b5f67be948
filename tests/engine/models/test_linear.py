"""Quantized linear layers: rounding, products and layouts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from engine.layers.linear import Fp8Linear, Int4Linear, round_fp8
from engine.layers.mxfp4_linear import Mxfp4Linear, e2m1, e8m0

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


def every_mxfp4() -> torch.Tensor:
    """Return all numbers of four bits, times the powers of all exponents: float32 [256, 16]."""
    codes, exponents = torch.arange(16, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    return e2m1(codes) * e8m0(exponents)[:, None]


def test_mxfp4_numbers_are_those_of_the_format() -> None:
    """Section 5.3.3 of the format: a sign, two bits of exponent with a bias of one, a bit of mantissa, no infinity
    and no NaN; section 5.4: exponents with a bias of 127, and 255 for NaN.
    """
    found = every_mxfp4()
    for exponent in (0, 1, 100, 127, 200, 252):
        for code in range(16):
            high, low = code >> 1 & 3, code & 1
            magnitude = (1 + low / 2) * 2.0 ** (high - 1) if high else low / 2
            number = math.ldexp(-magnitude if code & 8 else magnitude, exponent - 127)
            assert float(found[exponent, code]) == number, (exponent, code)
    assert found[255].isnan().all()


def test_mxfp4_numbers_are_exact_in_bfloat16_if_they_are_in_float32() -> None:
    """The largest numbers of the exponents 253 and 254 are too large for both, and become infinite in both."""
    found = every_mxfp4()
    narrow = found.bfloat16().float()
    assert torch.equal(narrow[:255], found[:255]) and narrow[255].isnan().all()
    assert found[:253].isfinite().all()
    is_infinite = found[253:255].isinf()
    assert is_infinite.tolist() == [[code & 7 >= first for code in range(16)] for first in (6, 4)]
    assert (found[0, 1:8] >= 2.0**-128).all(), "the smallest are not zero"


def test_mxfp4_packs_the_halves_of_a_group_together() -> None:
    layer = Mxfp4Linear(nn.Linear(64, 8, bias=False, device="meta"))
    layer.allocate(CPU)
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (8, 64), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(120, 130, (8, 2), generator=generator, dtype=torch.uint8)
    layer.put(codes, exponents)
    assert layer.packed[3, 21] == codes[3, 37] | codes[3, 53] << 4
    expected = e2m1(codes) * e8m0(exponents).repeat_interleave(32, 1)
    assert torch.equal(layer.dequantized(), expected)
    x = torch.randn(3, 64, generator=generator)
    assert torch.allclose(layer(x), x @ expected.t())
    assert layer(x.bfloat16()).dtype == torch.bfloat16
