"""A layer's mixture of experts: whether it is right, and its time with what its weights or its products need.

Each call has another routing, so that the cache does not hold the weights that it reads. DeepGEMM multiplies the
same matrices where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.gpu_sections.foreign_kernels import deep_gemm
from benchmarks.gpu_sections.limits import Rates
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.random_model import draw
from benchmarks.gpu_sections.timing import recorded_seconds_of
from engine.layers.linear import Fp8BlockLinear, Int4Linear, QuantizedLinear
from engine.layers.matrix_stack import MatrixStack
from engine.layers.mxfp4_linear import Mxfp4Linear
from engine.layers.operations import Matrices
from engine.models.experts import experts_mlp


class _Mixture(NamedTuple):
    num_experts: int
    per_token: int
    hidden: int
    inner: int
    tokens: tuple[int, ...]
    """Tokens of the batches: few and many per expert, as each size of tiles has its own kernels."""


_QWEN3_30B = _Mixture(128, 8, 2048, 768, (1, 8, 64, 700, 4096))
_TINY = _Mixture(6, 2, 48, 40, (1, 9))
_TINY_QUANTIZED = _Mixture(4, 2, 128, 128, (3,))
_TINY_PRODUCTS = _Mixture(4, 2, 128, 128, (1, 1, 5))


class _Kind(NamedTuple):
    """How matrices are stored."""

    name: str
    layer: Callable[[nn.Linear], QuantizedLinear] | None
    """None: plain bfloat16."""
    weight_bytes: float
    """Bytes of a weight, with its part of scales and zero points."""
    speed: int
    """Products in the time of one of bfloat16."""
    most: float
    """Largest error beside a size of 1: sums are float32, and operands, what is between and results bfloat16. What
    is between may be rounded to a neighbouring number of eight bits, too.
    """


_ROUTINGS = 16
_MOST_OF_PACKAGES = 0.3
"""Largest error of a product with a deviation of 1, the operands of which may be rounded to eight bits."""
_KINDS = (
    _Kind("", None, 2, 1, 0.04),
    _Kind(" in fp8 blocks", Fp8BlockLinear, 1 + 4 / (32 * 128), 2, 0.12),
    _Kind(" in int4", partial(Int4Linear, group_size=128), 0.5 + 5 / 128, 1, 0.04),
    _Kind(" in mxfp4", Mxfp4Linear, 0.5 + 1 / 32, 1, 0.04),
)


def experts(device: torch.device, rates: Rates, is_tiny: bool) -> Iterator[Measurement]:
    """A line for each batch, of a layer of Qwen3-30B-A3B, plain and quantized. Each token goes to experts drawn at
    random.
    """
    for kind in _KINDS:
        tiny = _TINY if kind.layer is None else _TINY_QUANTIZED
        yield from _of_kind(kind, tiny if is_tiny else _QWEN3_30B, device, rates)
    mixture = _TINY_PRODUCTS if is_tiny else _QWEN3_30B
    generator = torch.Generator(device).manual_seed(1)
    sizes = (2 * mixture.inner, mixture.hidden), (mixture.hidden, mixture.inner)
    gate_up, down = (_drawn(_KINDS[0], mixture.num_experts, *size, generator) for size in sizes)
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    for kind in _KINDS[:2]:
        yield from _by_deep_gemm(kind, mixture, (gate_up, down), rates, generator)


def _of_kind(kind: _Kind, mixture: _Mixture, device: torch.device, rates: Rates) -> Iterator[Measurement]:
    from engine.kernels.triton import grouped_gemm

    generator = torch.Generator(device).manual_seed(0)
    gate_up = _drawn(kind, mixture.num_experts, 2 * mixture.inner, mixture.hidden, generator)
    down = _drawn(kind, mixture.num_experts, mixture.hidden, mixture.inner, generator)
    right = [matrices.float() if isinstance(matrices, torch.Tensor) else matrices for matrices in (gate_up, down)]
    for tokens in mixture.tokens:
        x = torch.randn(tokens, mixture.hidden, generator=generator, device=device).to(torch.bfloat16)
        routings = [_routing(tokens, mixture, generator) for _ in range(_ROUTINGS)]
        chosen, shares = routings[0]
        expected = experts_mlp(x.float(), chosen, shares, right[0], right[1], 0)
        call = partial(grouped_gemm.experts_mlp, x, chosen, shares, gate_up, down, 0)
        off = (call().float() - expected).abs() / expected.abs().clamp(min=1)
        error = float(off.nan_to_num(nan=torch.inf).max())
        calls = [partial(grouped_gemm.experts_mlp, x, *routing, gate_up, down, 0) for routing in routings]
        seconds = recorded_seconds_of(calls, device)
        weights = 3 * mixture.hidden * mixture.inner
        num_read = sum(len(some.unique()) for some, _ in routings) / len(routings)
        num_bytes = num_read * weights * kind.weight_bytes
        operations = 2 * chosen.numel() * weights / kind.speed
        least = partial(Rates.least, num_bytes=num_bytes, operations=operations)
        yield Measurement(
            f"experts{kind.name}, {tokens} token{'s' * (tokens > 1)}",
            by="triton",
            ms=1000 * seconds,
            **rates.shares(least, seconds),
            passed=error <= kind.most,
            error=error,
            note=f"{mixture.per_token} of {mixture.num_experts}; error {error:.4f}, at most {kind.most}",
        )


def _routing(tokens: int, mixture: _Mixture, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the experts of each token, and their shares."""
    logits = torch.randn(tokens, mixture.num_experts, generator=generator, device=generator.device)
    shares, chosen = logits.softmax(-1).topk(mixture.per_token)
    return chosen, shares / shares.sum(-1, keepdim=True)


def _by_deep_gemm(
    kind: _Kind,
    mixture: _Mixture,
    matrices: tuple[torch.Tensor, torch.Tensor],
    rates: Rates,
    generator: torch.Generator,
) -> Iterator[Measurement]:
    """Yield lines of both products, without the activation between them. The package compiles at first use."""
    what, device = f"experts' products{kind.name}", generator.device
    for tokens in mixture.tokens[2:]:
        x = torch.randn(tokens, mixture.hidden, generator=generator, device=device).to(torch.bfloat16)
        chosen, _ = _routing(tokens, mixture, generator)
        try:
            grouped = deep_gemm(x, chosen, *matrices, is_fp8=kind.speed > 1)
            found = grouped.call()[grouped.is_real].float()
            error = float((found - grouped.expected.float()).abs().nan_to_num(nan=torch.inf).max())
            seconds = recorded_seconds_of([grouped.call], device)
        except Exception as failure:  # The package may not be made for this torch.
            note = f"left out: {type(failure).__name__}: {str(failure)[:150]}"
            yield Measurement(what, by="deep_gemm", note=note)
            return
        weights = 3 * mixture.hidden * mixture.inner
        least = partial(
            Rates.least,
            num_bytes=len(chosen.unique()) * weights * kind.weight_bytes,
            operations=2 * chosen.numel() * weights / kind.speed,
        )
        note = f"{len(grouped.is_real)} rows with padding; error {error:.4f}, at most {_MOST_OF_PACKAGES}"
        yield Measurement(
            f"{what}, {tokens} tokens",
            by="deep_gemm",
            ms=1000 * seconds,
            **rates.shares(least, seconds),
            passed=error <= _MOST_OF_PACKAGES,
            error=error,
            note=note,
        )


def _drawn(kind: _Kind, count: int, outputs: int, inputs: int, generator: torch.Generator) -> Matrices:
    """Return the matrices of all experts. Products with rows of deviation 1 have that deviation."""
    device = generator.device
    if kind.layer is None:
        values = torch.randn(count, outputs, inputs, generator=generator, device=device)
        values /= inputs**0.5
        return values.to(torch.bfloat16)
    with torch.device("meta"):
        layers = [kind.layer(nn.Linear(inputs, outputs, bias=False)) for _ in range(count)]
    stack = MatrixStack(layers, torch.bfloat16, device)
    for layer in layers:
        draw(layer, generator)
    return stack
