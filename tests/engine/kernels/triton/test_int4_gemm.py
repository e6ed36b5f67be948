"""The int4 kernel compared with the same matrix widened by torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from engine.kernels.triton import split_k
from engine.kernels.triton.int4_gemm import int4_linear
from engine.layers.linear import Int4Linear
from tests.engine.support.devices import DEVICE


def layer(inputs: int, outputs: int, group: int) -> Int4Linear:
    """Return a layer with random codes, zero points up to 16 and different scales."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        made = Int4Linear(nn.Linear(inputs, outputs, bias=False), group)
    made.allocate(DEVICE)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    shape = inputs // group, outputs
    scales = torch.exp(torch.randn(shape, generator=generator))
    zeros = torch.randint(0, 17, shape, generator=generator, dtype=torch.uint8)
    made.put(slice(None), codes.to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE))
    expected = (codes.float() - zeros.repeat_interleave(group, 0).t()) * scales.repeat_interleave(group, 0).t()
    assert torch.equal(made.dequantized().cpu(), expected)
    return made


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group"),
    [
        (1, 64, 64, 32),
        (3, 96, 72, 32),  # outputs and groups that fill no tile
        (17, 128, 64, 64),
        (65, 64, 8, 64),  # more rows than a program takes
        (2, 256, 40, 256),  # one group, of several tiles
        (2, 192, 64, 192),  # of an odd size
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products(rows: int, inputs: int, outputs: int, group: int, dtype: torch.dtype) -> None:
    made = layer(inputs, outputs, group)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    found = int4_linear(x, made.packed, made.scales, made.zeros, group)
    exact = x.double() @ made.dequantized().double().t()
    size = x.double().abs() @ made.dequantized().double().abs().t()
    assert found.dtype == dtype and found.shape == (rows, outputs)
    error = (found.double() - exact).abs()
    assert (error <= size * 1e-6 + exact.abs() * torch.finfo(dtype).eps).all()


def test_rows_may_be_strided() -> None:
    made = layer(64, 64, 32)
    wide = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    x = wide[:, 1]
    found = int4_linear(x, made.packed, made.scales, made.zeros, 32)
    assert torch.equal(found, int4_linear(x.contiguous(), made.packed, made.scales, made.zeros, 32))


def test_a_row_is_the_same_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are divided by the matrix's shape alone, and their shares are summed in one order."""
    monkeypatch.setattr(split_k, "PROGRAMS", 4)
    made = layer(192, 72, 32)
    x = torch.randn(40, 192, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    together = int4_linear(x, made.packed, made.scales, made.zeros, 32)
    for row in (0, 21, 39):
        alone = int4_linear(x[row : row + 1], made.packed, made.scales, made.zeros, 32)
        assert torch.allclose(alone[0], together[row], rtol=1e-5, atol=1e-4)
