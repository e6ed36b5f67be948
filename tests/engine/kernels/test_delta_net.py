"""Gated delta nets by the native kernels, beside the recurrence in float64 and torch's own form, for each
instruction set of this processor.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from engine.attention.state_slots import LayerState
from engine.kernels import native
from engine.model_parts.parts import DeltaNetConfig
from engine.models.delta_net import GatedDeltaNet
from engine.models.native_delta_net import NativeDeltaHeads, unsupported
from engine.models.torch_delta_net import TorchDeltaHeads
from tests.engine.support.delta_nets import (
    EPS,
    Inputs,
    Run,
    copy_of,
    inputs_of,
    layer_of,
    recurrence,
    state_of,
    step_of,
    wide,
    without_z,
)

_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.05}
"""Largest error of outputs and states of size about 1: inputs and outputs are of the type."""
_SHAPES = [DeltaNetConfig(2, 4, 64, 96, 4), DeltaNetConfig(3, 3, 32, 32, 2), DeltaNetConfig(1, 2, 128, 128, 4)]
_AT_ONCE = 32
"""Tokens that delta_prompt.c takes at a time."""


def native_of(layer: GatedDeltaNet, kernels: native.Kernels) -> NativeDeltaHeads:
    """The layer's heads by these kernels."""
    conv, norm = layer.conv.to(kernels.dtype), layer.norm.to(kernels.dtype)
    return NativeDeltaHeads(layer.shape, conv, norm, EPS, kernels.isa)


def run_alone(heads: NativeDeltaHeads | TorchDeltaHeads, run: Run, state: LayerState) -> torch.Tensor:
    """What heads compute of one row."""
    inputs, batch = step_of([run])
    return further_apart(inputs).run(heads, state, batch)


def further_apart(inputs: Inputs) -> Inputs:
    """The same, of rows further apart than they are long, as projections give them."""
    mixed, z = (F.pad(part, (0, 5))[:, :-5] for part in (inputs.mixed, inputs.z))
    return inputs._replace(mixed=mixed, z=z)


def check_runs(layer: GatedDeltaNet, runs: Sequence[Run], kernels: native.Kernels, threads: int = 1) -> None:
    """Outputs and all slots are those of the recurrence, and of each row alone bit for bit."""
    state = state_of(layer.shape, kernels.dtype)
    expected, alone, by_kernels = copy_of(state, torch.float64), copy_of(state), native_of(layer, kernels)
    # The kernels convolve with weights of the type.
    layer.conv.copy_(layer.conv.to(kernels.dtype))
    layer.norm.copy_(layer.norm.to(kernels.dtype))
    all_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        inputs, batch = step_of(runs)
        outputs = further_apart(inputs).run(by_kernels, state, batch).split([len(run.inputs.z) for run in runs])
        singly = [run_alone(by_kernels, run, alone) for run in runs]
    finally:
        torch.set_num_threads(all_threads)
    for run, output, single in zip(runs, outputs, singly, strict=True):
        wanted = recurrence(layer, run, expected)
        assert output.dtype == kernels.dtype
        bound = _TOLERANCE[kernels.dtype] * wanted.abs().max().clamp(min=1)
        assert (output - wanted).abs().max() < bound
        assert torch.equal(output, single), "the same alone, bit for bit"
    assert torch.equal(alone.matrices, state.matrices)
    assert (state.matrices - expected.matrices).abs().max() < 2e-5
    assert torch.equal(state.inputs.double(), expected.inputs)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", _SHAPES)
def test_a_step_is_that_of_torch(kernels: native.Kernels, shape: DeltaNetConfig, threads: int) -> None:
    """Rows advance in place, and from one slot into others, several from the same; no other slot changes."""
    torch.manual_seed(0)
    layer, state = layer_of(shape), state_of(shape, kernels.dtype)
    step = native_of(layer, kernels)
    before, expected = copy_of(state), copy_of(state, torch.float32)
    inputs = inputs_of(layer, 4, kernels.dtype)
    sources, targets = torch.tensor([0, 1, 1, 3]), torch.tensor([0, 2, 4, 3])
    by_torch = TorchDeltaHeads(shape, layer.conv, layer.norm, EPS)
    wanted = by_torch.step(*wide(inputs).of_heads, expected, sources, targets)

    all_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        own, z = inputs.of_heads
        got = step.step(own, z, state, sources, targets)
        for row in range(len(got)):
            one = torch.tensor([row])
            alone = step.step(own.at(one), z[one], before, sources[one], targets[one])
            assert torch.equal(alone, got[one])
    finally:
        torch.set_num_threads(all_threads)
    assert torch.equal(before.matrices, state.matrices), "the same alone, bit for bit"
    assert (got - wanted).abs().max() < _TOLERANCE[kernels.dtype] * wanted.abs().max().clamp(min=1)
    assert (state.matrices - expected.matrices).abs().max() < _TOLERANCE[kernels.dtype]
    assert torch.equal(state.inputs.float(), expected.inputs)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", _SHAPES)
def test_prompts_are_the_recurrence(kernels: native.Kernels, shape: DeltaNetConfig, threads: int) -> None:
    """Ragged: of one token, of about as many as are taken at a time, and of several times as many; each goes on
    from a state, in place or not.
    """
    torch.manual_seed(1)
    layer = layer_of(shape)
    lengths = (1, 2, _AT_ONCE - 1, _AT_ONCE, _AT_ONCE + 1, 3 * _AT_ONCE + 7)
    slots = ((0, 0), (8, 1), (8, 2), (3, 3), (4, 4), (8, 5))
    runs = [
        Run(inputs_of(layer, length, kernels.dtype), 0, source, [(length, target)])
        for length, (source, target) in zip(lengths, slots, strict=True)
    ]
    check_runs(layer, runs, kernels, threads)


def test_states_are_kept_at_borders_and_before_drafts(kernels: native.Kernels) -> None:
    """Also where the first border lies within the convolution's view, and where a row replays tokens of which only
    the state is wanted: none, one and several, in the slot that it goes on from.
    """
    torch.manual_seed(2)
    layer = layer_of(_SHAPES[0])
    replays = inputs_of(layer, 6, kernels.dtype), inputs_of(layer, 4, kernels.dtype)
    runs = [
        Run(inputs_of(layer, 70, kernels.dtype), 0, 8, [(1, 0), (2, 1), (64, 2), (70, 3)]),
        Run(inputs_of(layer, 5, kernels.dtype), 0, 4, [(0, 4)]),
        Run(without_z(replays[0], 1), 1, 5, [(1, 5)]),
        Run(without_z(replays[1], 3), 3, 6, [(3, 6)]),
    ]
    check_runs(layer, runs, kernels)


@pytest.mark.parametrize("decay", [0.0, -1e-6, -30.0, -200.0])
def test_states_that_hardly_forget_and_that_forget_all(kernels: native.Kernels, decay: float) -> None:
    """Every second token's decay is an extreme one: exp(-200) is 0 in float32."""
    torch.manual_seed(3)
    layer = layer_of(_SHAPES[1])
    inputs = inputs_of(layer, 2 * _AT_ONCE + 1, kernels.dtype)
    inputs.decay[::2] = decay
    check_runs(layer, [Run(inputs, 0, 2, [(len(inputs.mixed), 2)])], kernels)


def test_prompts_by_torch_are_the_recurrence() -> None:
    torch.manual_seed(4)
    layer = layer_of(_SHAPES[0])
    state = state_of(layer.shape, torch.float32)
    expected = copy_of(state, torch.float64)
    run = Run(inputs_of(layer, 150, torch.float32), 0, 8, [(1, 0), (64, 1), (150, 2)])
    wanted, heads = recurrence(layer, run, expected), TorchDeltaHeads(_SHAPES[0], layer.conv, layer.norm, EPS)
    assert (run_alone(heads, run, state) - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert (state.matrices - expected.matrices).abs().max() < 2e-5
    assert torch.equal(state.inputs.double(), expected.inputs)


def test_other_sizes_are_left_to_torch() -> None:
    said = unsupported(DeltaNetConfig(2, 4, 24, 32, 4), torch.float32)
    assert said == "key_dim 24: not a multiple of 32 up to 512"
