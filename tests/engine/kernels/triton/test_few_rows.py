"""Products of few rows, and of float8 numbers in blocks, compared with torch's in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from engine.kernels.triton import split_k
from engine.kernels.triton.few_rows import fp8_few_rows, plain_few_rows
from engine.kernels.triton.fp8_gemm import fp8_block_linear
from engine.layers.linear import FP8, round_fp8
from tests.engine.support.devices import DEVICE

_FP8_SUMS = 1e-6 if DEVICE.type == "cpu" else 2.0**-12
"""Tensor cores add products of float8 with some 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_close(
    found: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    sums: float = 1e-6,
) -> None:
    """Compare with the exact product, but for rounded sums and one rounding to the result's type."""
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t() + exact.abs()
    assert ((found.double() - exact).abs() <= size * sums + exact.abs() * torch.finfo(found.dtype).eps).all()


@pytest.mark.parametrize("programs", [1, 4, 264])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 512, 64), (3, 200, 72), (8, 1030, 130), (5, 64, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_products(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one program or by several that divide the inputs, evenly or not; with sizes that fill no tile."""
    monkeypatch.setattr(split_k, "PROGRAMS", programs)
    x, weight, bias = (
        part.to(dtype) for part in (random(rows, inputs), random(outputs, inputs, seed=1), random(outputs))
    )
    for added in (None, bias):
        found = plain_few_rows(x, weight, added)
        assert found.dtype == dtype and found.shape == (rows, outputs)
        assert_close(found, x, weight, added)
    assert not split_k.counters(DEVICE).any(), "the next product counts from zero again"


def test_rows_may_be_strided_and_are_the_same_in_any_batch() -> None:
    x, weight = random(8, 2, 600)[:, 1].bfloat16(), random(72, 600, seed=1).bfloat16()
    wide = random(8, 2, 600).bfloat16()[:, 1]
    assert not wide.is_contiguous()
    together = plain_few_rows(wide, weight, None)
    assert torch.equal(together, plain_few_rows(x.contiguous(), weight, None))
    for row in (0, 7):
        assert torch.equal(plain_few_rows(wide[row : row + 1], weight, None)[0], together[row])


@pytest.mark.parametrize("programs", [1, 264])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 512, 64), (8, 784, 80)])
def test_fp8_products_with_scales_of_rows(
    rows: int, inputs: int, outputs: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_k, "PROGRAMS", programs)
    (x, x_scale), (weight, scale) = round_fp8(random(rows, inputs)), round_fp8(random(outputs, inputs, seed=1))
    bias = random(outputs, seed=2).bfloat16()
    found = fp8_few_rows(x, x_scale, weight, scale, bias, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert_close(found, x.double() * x_scale.double()[:, None], weight.double() * scale.double()[:, None], bias)


@pytest.mark.parametrize("programs", [1, 264])
@pytest.mark.parametrize("rows", [1, 8, 9, 64, 65])
@pytest.mark.parametrize(("inputs", "outputs", "height"), [(128, 32, 32), (384, 96, 32), (256, 256, 128)])
def test_fp8_products_in_blocks(
    inputs: int, outputs: int, height: int, rows: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales differ by powers of two from block to block, so that a wrong one would show."""
    monkeypatch.setattr(split_k, "PROGRAMS", programs)
    factors = torch.exp2(random(rows, inputs // 128, seed=3).round()).repeat_interleave(128, 1)
    x, x_scale = round_fp8(random(rows, inputs) * factors, 128)
    x_scale = x_scale.view(rows, -1)
    weight = random(outputs, inputs, seed=1).to(FP8)
    scale = torch.exp2(random(outputs // height, inputs // 128, seed=2).round())
    found = fp8_block_linear(x, x_scale, weight, scale, torch.bfloat16)
    restored = weight.double() * scale.double().repeat_interleave(height, 0).repeat_interleave(128, 1)
    assert_close(found, x.double() * x_scale.double().repeat_interleave(128, 1), restored, sums=_FP8_SUMS)
