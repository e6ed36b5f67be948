"""Quantized experts in Triton's interpreter compared with torch's layers: each kind of matrix, alone and mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from engine.kernels.triton import expert_products
from engine.kernels.triton.grouped_gemm import experts_mlp as triton_mlp
from engine.layers import linear
from engine.layers.linear import Fp8BlockLinear, Fp8Linear, Int4Linear
from engine.layers.matrix_stack import MatrixStack
from engine.layers.mxfp4_linear import Mxfp4Linear
from engine.model_parts.experts_config import Clamp
from engine.models.experts import experts_mlp, route
from tests.engine.support.devices import DEVICE

EXPERTS, HIDDEN, INNER = 5, 256, 128
SIZES = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
Made = tuple[MatrixStack, torch.Tensor]
"""A stack, and the numbers that it stands for, float32 [E, outputs, inputs]."""


def drawn(kind: str, matrix: str, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Made:
    """Draw the matrices of all experts and quantize each."""
    outputs, inputs = SIZES[matrix]
    with torch.device("meta"):
        plain = [nn.Linear(inputs, outputs, bias=False) for _ in range(EXPERTS)]
    group = 64 if kind == "groups" else inputs
    kinds: dict[str, Callable[[nn.Linear], Any]] = {
        "outputs": Fp8Linear,
        "blocks": Fp8BlockLinear,
        "groups": lambda layer: Int4Linear(layer, group),
        "one group": lambda layer: Int4Linear(layer, group),
        "mxfp4": Mxfp4Linear,
        "plain": lambda layer: layer,
    }
    layers = [kinds[kind](layer) for layer in plain]
    stack = MatrixStack(layers, dtype, DEVICE)
    for layer in layers:
        values = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(DEVICE)
        if isinstance(layer, Fp8Linear):
            layer.put(slice(None), values)
        elif isinstance(layer, Int4Linear):
            codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
            zeros = torch.randint(0, 17, (inputs // group, outputs), generator=generator, dtype=torch.uint8)
            scales = torch.rand(inputs // group, outputs, generator=generator) / (4 * inputs**0.5)
            layer.put(slice(None), codes.to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE))
        elif isinstance(layer, Mxfp4Linear):
            codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
            exponents = torch.randint(118, 126, (outputs, inputs // 32), generator=generator, dtype=torch.uint8)
            layer.put(codes.to(DEVICE), exponents.to(DEVICE))
        elif isinstance(layer, Fp8BlockLinear):
            scales = torch.rand(outputs // 32, inputs // 128, generator=generator).to(DEVICE) / 400 + 1 / 400
            layer.scale.copy_(scales)
            wide = scales.repeat_interleave(32, 0).repeat_interleave(128, 1)
            layer.weight.copy_((values / wide).to(torch.float8_e4m3fn))
        else:
            layer.weight.data.copy_(values)
    meant = [layer.weight.float() if isinstance(layer, nn.Linear) else layer.dequantized() for layer in layers]
    return stack, torch.stack(meant)


def numbers(tokens: int, per_token: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Rows, and their experts and shares, of which expert 0 has none."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(DEVICE, dtype)
    chosen = torch.stack([1 + torch.randperm(EXPERTS - 1, generator=generator)[:per_token] for _ in range(tokens)])
    return x, chosen.to(DEVICE), torch.rand(tokens, per_token, generator=generator).to(DEVICE)


def by_layers(*args: Any) -> torch.Tensor:
    """Return what torch's layers make of numbers rounded to float8 without a GPU's products of such numbers."""
    with patch.object(linear, "multiplies_fp8", lambda device: False):
        return experts_mlp(*args)


ROUNDED = 0.003 if DEVICE.type == "cpu" else 0.01
"""Difference of results if numbers are rounded to float8 on the way: tensor cores add with some 14 bits, so that
one in some hundred numbers is rounded otherwise."""


def close(found: torch.Tensor, expected: torch.Tensor, most: float) -> bool:
    """Whether the numbers differ by so much of their size. A single one may be rounded to float8 otherwise."""
    return bool((found.float() - expected.float()).norm() <= most * expected.float().norm())


KINDS = [
    ("outputs", "outputs"),
    ("blocks", "blocks"),
    ("groups", "groups"),
    ("one group", "groups"),
    ("mxfp4", "mxfp4"),
    ("blocks", "outputs"),
    ("plain", "groups"),
    ("blocks", "plain"),
]
"""Of the first matrices and of the second: ranks may divide the blocks of one, and files leave one plain."""


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("kinds", KINDS)
def test_experts_are_those_of_their_layers(kinds: tuple[str, str], tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    (gate_up, _), (down, _) = (drawn(kind, name, generator) for kind, name in zip(kinds, SIZES, strict=True))
    x, chosen, weights = numbers(tokens, 3)
    found = triton_mlp(x, chosen, weights, gate_up, down, 0)
    expected = by_layers(x, chosen, weights, gate_up, down, 0)
    rounds = {"outputs", "blocks"} & set(kinds)
    assert close(found, expected, ROUNDED if rounds else 1e-6)


@pytest.mark.parametrize(("tokens", "dtype"), [(3, torch.float16), (81, torch.bfloat16)])
@pytest.mark.parametrize("kinds", [*KINDS[:3], ("mxfp4", "mxfp4")])
def test_tiles_of_each_size_in_half_the_width(kinds: tuple[str, str], tokens: int, dtype: torch.dtype) -> None:
    """Results are within a few roundings of those in float32. With 81 tokens tiles are large."""
    generator = torch.Generator().manual_seed(2)
    (gate_up, _), (down, _) = (drawn(kind, name, generator) for kind, name in zip(kinds, SIZES, strict=True))
    x, chosen, weights = numbers(tokens, 4, dtype)
    found = triton_mlp(x, chosen, weights, gate_up, down, 0)
    assert found.dtype == dtype
    assert close(found, by_layers(x.float(), chosen, weights, gate_up, down, 0), 0.02)


@pytest.mark.parametrize("kinds", [*KINDS[:3], ("blocks", "outputs")])
def test_a_gpu_without_float8_widens_weights_and_leaves_activations(
    kinds: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_products, "makes_fp8", lambda device: False)
    generator = torch.Generator().manual_seed(4)
    (gate_up, wide), (down, wide_down) = (
        drawn(kind, name, generator) for kind, name in zip(kinds, SIZES, strict=True)
    )
    x, chosen, weights = numbers(11, 2)
    found = triton_mlp(x, chosen, weights, gate_up, down, 0)
    assert close(found, experts_mlp(x, chosen, weights, wide, wide_down, 0), 1e-6)


def test_every_number_of_eight_bits_is_widened_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the two that are none are weights of the first matrix, the smallest and zeros among them."""
    monkeypatch.setattr(expert_products, "makes_fp8", lambda device: False)
    (gate_up, _), (down, wide) = (drawn("outputs", name, torch.Generator().manual_seed(5)) for name in SIZES)
    codes = torch.tensor([code for code in range(256) if code & 127 != 127] + [0, 0], dtype=torch.uint8)
    gate_up.tensors["weight"].copy_(codes.view(torch.float8_e4m3fn).to(DEVICE))
    gate_up.tensors["scale"].fill_(2**-9)
    x = torch.eye(HIDDEN, device=DEVICE)[:254]  # each row reads one number
    chosen, weights = torch.zeros(254, 1, dtype=torch.int64, device=DEVICE), torch.ones(254, 1, device=DEVICE)
    numbers_read = (codes.view(torch.float8_e4m3fn).float() / 512).to(DEVICE)
    expected = experts_mlp(x, chosen, weights, numbers_read.expand(1, 2 * INNER, -1), wide, 0)
    off = (triton_mlp(x, chosen, weights, gate_up, down, 0) - expected).norm(dim=1)
    assert (off <= 1e-6 * expected.norm(dim=1)).all(), "of each, however small"


def mxfp4(experts: int, outputs: int, inputs: int, exponents: torch.Tensor | None = None) -> Made:
    """Draw codes and, unless they are given, exponents."""
    generator = torch.Generator().manual_seed(9)
    with torch.device("meta"):
        layers = [Mxfp4Linear(nn.Linear(inputs, outputs, bias=False)) for _ in range(experts)]
    stack = MatrixStack(layers, torch.float32, DEVICE)
    for expert, layer in enumerate(layers):
        codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
        drawn_exponents = torch.randint(118, 126, (outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        own = drawn_exponents if exponents is None else exponents[expert]
        layer.put(codes.to(DEVICE), own.to(DEVICE))
    return stack, torch.stack([layer.dequantized() for layer in layers])


def one_by_one(
    experts: int, inputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, their experts and shares, and first matrices, such that second matrices get rows of one 1."""
    one = torch.eye(inputs, device=DEVICE, dtype=dtype)
    gate_up = torch.cat((64 * one, one / 64)).expand(experts, -1, -1).contiguous()  # silu(64) is 64
    chosen = torch.arange(experts, device=DEVICE).repeat_interleave(inputs)[:, None]
    return one.repeat(experts, 1), chosen, torch.ones(len(chosen), 1, device=DEVICE), gate_up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mxfp4_number_is_widened_exactly(dtype: torch.dtype) -> None:
    """Of all exponents that leave all numbers finite. A device may take those below 2^-126 for zero."""
    exponents = torch.arange(256, dtype=torch.uint8).clamp(max=252).view(2, 64, 2)
    down, wide = mxfp4(2, 64, 64, exponents)
    found = triton_mlp(*one_by_one(2, 64, dtype), down, 0)
    expected = wide.mT.flatten(0, 1)
    assert expected.unique().numel() > 1000, "nearly all of them are drawn, of which 1023 differ"
    assert ((found.float() - expected).abs() < 2**-126).all()


def test_an_mxfp4_exponent_of_nan_makes_its_output_nan_and_no_other() -> None:
    """Nor one of the expert before, whose exponents end where its own begin."""
    exponents = torch.full((2, 64, 2), 120, dtype=torch.uint8)
    exponents[1, 5, 0] = 255
    down, _ = mxfp4(2, 64, 64, exponents)
    down.tensors["packed"].bitwise_and_(0x77).bitwise_or_(0x11)  # all are positive: infinity would stay infinite
    gate_up = one_by_one(2, 64, torch.float32)[-1]
    ones, chosen = torch.ones(2, 64, device=DEVICE), torch.arange(2, device=DEVICE)[:, None]
    found = triton_mlp(ones, chosen, torch.ones(2, 1, device=DEVICE), gate_up, down, 0)
    assert found.isnan().nonzero().tolist() == [[1, 5]]
    layers = [layer for layer in down.layers if isinstance(layer, Mxfp4Linear)]
    expected = torch.stack([layer.dequantized().sum(1) for layer in layers])
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("tokens", [3, 81])
def test_clamped_mxfp4_experts_with_biases(tokens: int) -> None:
    """As gpt-oss has them, with sizes that end within what is multiplied together."""
    hidden, inner, generator = 96, 160, torch.Generator().manual_seed(10)
    (gate_up, wide), (down, wide_down) = mxfp4(EXPERTS, 2 * inner, hidden), mxfp4(EXPERTS, hidden, inner)
    first, second = (torch.randn(EXPERTS, size, generator=generator).to(DEVICE) for size in (2 * inner, hidden))
    x = torch.randn(tokens, hidden, generator=generator).to(DEVICE)
    _, chosen, weights = numbers(tokens, 2)
    rest = 0, (first, second), Clamp(1.702, 2.0)
    expected = experts_mlp(x, chosen, weights, wide, wide_down, *rest)
    assert close(triton_mlp(x, chosen, weights, gate_up, down, *rest), expected, 1e-6)
    assert close(experts_mlp(x, chosen, weights, gate_up, down, *rest), expected, 1e-6)


@pytest.mark.parametrize("kind", ["blocks", "groups", "mxfp4"])
def test_ranks_with_some_experts_each_sum_up_to_all(kind: str) -> None:
    generator = torch.Generator().manual_seed(6)
    stacks = [drawn(kind, name, generator)[0] for name in SIZES]
    x, chosen, weights = numbers(11, 3)
    total = torch.zeros_like(x)
    for first, end in ((0, 2), (2, 5)):
        parts = []
        for stack in stacks:
            part = MatrixStack(stack.layers[first:end], torch.float32, DEVICE)
            for name, whole in part.tensors.items():
                whole.copy_(stack.tensors[name][first:end])
            parts.append(part)
        total += triton_mlp(x, chosen, weights, parts[0], parts[1], first)
    for stack in stacks:  # whose layers were made parts of others
        for name, whole in stack.tensors.items():
            for layer, own in zip(stack.layers, whole, strict=True):
                layer.register_buffer(name, own)
    assert close(total, by_layers(x, chosen, weights, stacks[0], stacks[1], 0), ROUNDED)


@pytest.mark.parametrize("kind", ["outputs", "blocks", "groups", "mxfp4"])
def test_a_broken_row_breaks_no_other(kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    (gate_up, _), (down, _) = (drawn(kind, name, generator) for name in SIZES)
    x, _, _ = numbers(6, 2)
    router = torch.randn(EXPERTS, HIDDEN, generator=generator).to(DEVICE)
    expected = by_layers(x, *route(x @ router.T, 2, True), gate_up, down, 0)
    x[2] = torch.nan
    found = triton_mlp(x, *route(x @ router.T, 2, True), gate_up, down, 0)
    assert found[2].isnan().all()
    healthy = [0, 1, 3, 4, 5]
    assert close(found[healthy], expected[healthy], ROUNDED)


def test_experts_lie_in_contiguous_memory() -> None:
    stack, _ = drawn("blocks", "down", torch.Generator().manual_seed(8))
    for name, whole in stack.tensors.items():
        assert whole.is_contiguous() and len(whole) == EXPERTS
        for layer, own in zip(stack.layers, whole, strict=True):
            assert layer.get_buffer(name).data_ptr() == own.data_ptr()
