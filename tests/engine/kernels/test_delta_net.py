"""One token's step of gated delta nets by the native kernels, beside torch's, for each instruction set of this
processor.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.attention.state_slots import LayerState
from engine.kernels import native
from engine.loading.model_directory import demo_model_path
from engine.models.config import ModelConfig
from engine.models.delta_net import GatedDeltaNet
from engine.models.native_delta_net import NativeDeltaStep, unsupported
from engine.models.parts import DeltaNetConfig

_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.05}
"""Largest error of outputs and states of size about 1; torch rounds what it convolves to the type."""
_SLOTS = 7


def layer_of(shape: DeltaNetConfig) -> GatedDeltaNet:
    """A layer with random weights that computes by torch."""
    facts = ModelConfig.from_directory(demo_model_path())
    layer = GatedDeltaNet(replace(facts, delta_net=shape))
    layer._native = None
    torch.nn.init.normal_(layer.conv, std=0.5)
    torch.nn.init.normal_(layer.log_decay)
    torch.nn.init.normal_(layer.decay_bias)
    return layer.requires_grad_(False)


def state_of(shape: DeltaNetConfig, dtype: torch.dtype) -> LayerState:
    matrices = torch.randn(_SLOTS, shape.num_value_heads, shape.key_dim, shape.value_dim) / shape.key_dim**0.5
    return LayerState(torch.randn(_SLOTS, shape.kernel - 1, shape.channels).to(dtype), matrices, torch.empty(0))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "shape", [DeltaNetConfig(2, 4, 64, 96, 4), DeltaNetConfig(3, 3, 32, 32, 2), DeltaNetConfig(1, 2, 128, 128, 4)]
)
def test_a_step_is_that_of_torch(kernels: native.Kernels, shape: DeltaNetConfig, threads: int) -> None:
    """Rows advance in place, and from one slot into others, several from the same; no other slot changes."""
    torch.manual_seed(0)
    layer, state = layer_of(shape), state_of(shape, kernels.dtype)
    before, expected = state, LayerState(*(part.clone().float() for part in state))
    mixed = torch.randn(4, shape.channels + 5).to(kernels.dtype)[:, : shape.channels]
    gates = torch.randn(4, 2 * shape.num_value_heads).to(kernels.dtype)
    sources, targets = torch.tensor([0, 1, 1, 3]), torch.tensor([0, 2, 4, 3])
    wanted = layer._advance(mixed.float(), gates.float(), expected, sources, targets)

    step = NativeDeltaStep(shape, layer.conv.to(kernels.dtype), kernels.isa)
    decay, strength = layer._strengths(gates.float())
    all_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = LayerState(*(part.clone() for part in before))
        got = step(mixed, decay, strength, state, sources, targets)
        for row in range(len(mixed)):
            one = slice(row, row + 1)
            parts = mixed[one], decay[one], strength[one]
            assert torch.equal(step(*parts, alone, sources[one], targets[one]), got[one])
    finally:
        torch.set_num_threads(all_threads)
    assert torch.equal(alone.matrices, state.matrices), "the same alone, bit for bit"
    assert (got - wanted).abs().max() < _TOLERANCE[kernels.dtype]
    assert (state.matrices - expected.matrices).abs().max() < _TOLERANCE[kernels.dtype]
    assert torch.equal(state.inputs.float(), expected.inputs)


def test_other_sizes_are_left_to_torch() -> None:
    said = unsupported(DeltaNetConfig(2, 4, 24, 32, 4), torch.float32)
    assert said == "key_dim 24: not a multiple of 32 up to 512"
