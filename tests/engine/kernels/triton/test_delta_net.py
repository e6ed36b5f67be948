"""Gated delta nets by the kernels: decodes beside torch in float32, prompts beside the recurrence in float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
from engine.attention.pinned import to_device
from engine.attention.state_batch import StateBatch, StateRow
from engine.attention.state_slots import LayerState
from engine.kernels.delta_pieces import PIECE
from engine.kernels.triton import delta_net
from engine.model_parts.parts import DeltaNetConfig
from engine.models import delta_net as layers
from engine.models.delta_net import GatedDeltaNet
from engine.models.torch_delta_net import TorchDeltaHeads
from engine.models.triton_delta_net import TritonDeltaHeads
from tests.engine.support.delta_nets import (
    EPS,
    FACTS,
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
from tests.engine.support.devices import DEVICE

_SHAPES = [DeltaNetConfig(2, 4, 64, 96, 4), DeltaNetConfig(3, 3, 32, 24, 2), DeltaNetConfig(1, 2, 12, 40, 3)]
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest error of outputs and states of size about 1. Queries, keys and values are rounded to the type."""


def there(state: LayerState) -> LayerState:
    return LayerState(*(part.to(DEVICE) for part in state))


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [*_SHAPES, DeltaNetConfig(1, 2, 128, 128, 4), DeltaNetConfig(2, 6, 16, 7, 5)])
@pytest.mark.parametrize(("sources", "targets"), [([5, 0, 3], [5, 0, 3]), ([6, 6], [1, 4]), ([2], [2])], ids=str)
def test_decodes_are_those_of_torch(
    shape: DeltaNetConfig, dtype: torch.dtype, sources: list[int], targets: list[int]
) -> None:
    """Rows advance where they are, or resume from a state that others read too; no other slot changes. Slots are
    columns of a table, as in graphs. Results are the same before the gated norm, as between pieces of graphs.
    """
    torch.manual_seed(shape.channels)
    layer, state = layer_of(shape), state_of(shape, dtype)
    inputs, conv, norm = inputs_of(layer, len(sources), dtype), layer.conv.to(dtype), layer.norm.to(dtype)
    table = torch.tensor([sources, targets]).t().contiguous()
    batch = StateBatch(torch.arange(len(sources)), table[:, 0], table[:, 1], ())
    theirs = copy_of(state, torch.float32)
    before = copy_of(theirs)
    by_torch = TorchDeltaHeads(shape, conv.float(), norm.float(), EPS)
    expected = wide(inputs).run(by_torch, theirs, batch)
    expected_before = by_torch.advance(wide(inputs).of_heads[0], before, batch)

    ours, others = there(copy_of(state)), there(copy_of(state))
    heads = TritonDeltaHeads(shape, conv.to(DEVICE), norm.to(DEVICE), EPS)
    on_device, moved = Inputs(*(part.to(DEVICE) for part in inputs)), to_device(batch, DEVICE)
    found = on_device.run(heads, ours, moved)
    found_before = heads.advance(on_device.of_heads[0], others, moved)

    error = 1e-5 if dtype == torch.float32 else _TOLERANCE[dtype]
    assert found.dtype == dtype and found_before.dtype == torch.float32
    for mine, other in ((found, expected), (found_before, expected_before), (ours.matrices, theirs.matrices)):
        torch.testing.assert_close(mine.cpu().float(), other, rtol=error, atol=error)
    assert torch.equal(ours.inputs.cpu().float(), theirs.inputs)
    assert torch.equal(ours.inputs, others.inputs) and torch.equal(ours.matrices, others.matrices)
    untouched = [slot for slot in range(len(state.inputs)) if slot not in targets]
    assert torch.equal(ours.inputs.cpu()[untouched], state.inputs[untouched])
    assert torch.equal(ours.matrices.cpu()[untouched], state.matrices[untouched])


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
def test_strengths_are_those_in_float64(dtype: torch.dtype) -> None:
    """To the digits of float32, also where a state hardly decays or is forgotten."""
    heads, tokens = 5, 70
    gates = torch.randn(tokens, 2 * heads, generator=torch.Generator().manual_seed(1)).to(dtype)
    gates[:9, heads:] = torch.tensor([-80.0, -30, -17, -9, -1, 0, 17, 30, 80]).to(dtype)[:, None]
    gates[:9, :heads] = gates[:9, heads:]
    log_decay, decay_bias = torch.linspace(-2, 3, heads), torch.linspace(-1, 1, heads)
    x = gates[:, heads:].double() + decay_bias.double()
    decay = -log_decay.double().exp() * torch.log1p(x.exp())
    found = delta_net.strengths(*(part.to(DEVICE) for part in (gates, log_decay, decay_bias)))
    for mine, other in zip(found, (decay, gates[:, :heads].double().sigmoid()), strict=True):
        assert mine.dtype == torch.float32 and mine.is_contiguous()
        torch.testing.assert_close(mine.cpu().double(), other, rtol=2e-6, atol=0.0)


class Kernels(TorchDispatchMode):
    """Names the operations that launch kernels: all that neither view nor only allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if not func.is_view and func.overloadpacket.__name__ != "empty":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_decode_launches_four_kernels_besides_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    layer = layer_of(_SHAPES[0]).to(DEVICE)
    monkeypatch.setattr(layers, "kind_of_heads", lambda shape, conv: TritonDeltaHeads)
    launched: list[str] = []
    monkeypatch.setattr(delta_net, "launch", lambda kernel, *args, **options: launched.append(kernel.__name__))
    state, slots = there(state_of(_SHAPES[0], torch.float32)), torch.tensor([1, 4], device=DEVICE)
    step = SimpleNamespace(batch=SimpleNamespace(states=StateBatch.of_decodes(slots)))
    x = torch.randn(2, FACTS.hidden_size, device=DEVICE)
    with Kernels() as kernels:
        layer(x, cast(Any, None), cast(Any, step), state)
    assert launched == ["_strengths", "_convolve", "_advance", "_gate"]
    assert kernels.names == ["mm"] * 3


def run_on(device: torch.device, heads: TritonDeltaHeads, runs: Sequence[Run], state: LayerState) -> torch.Tensor:
    inputs, batch = step_of(runs)
    return Inputs(*(part.to(device) for part in inputs)).run(heads, state, to_device(batch, device))


def check_runs(layer: GatedDeltaNet, runs: Sequence[Run], dtype: torch.dtype) -> None:
    """Outputs and all slots are those of the recurrence, and slots are those of each row alone bit for bit."""
    state = state_of(layer.shape, dtype)
    expected, alone, state = copy_of(state, torch.float64), there(copy_of(state)), there(state)
    layer.conv.copy_(layer.conv.to(dtype))
    layer.norm.copy_(layer.norm.to(dtype))
    heads = TritonDeltaHeads(layer.shape, layer.conv.to(DEVICE, dtype), layer.norm.to(DEVICE, dtype), EPS)
    step = partial(run_on, DEVICE, heads)
    outputs = step(runs, state).split([len(run.inputs.z) for run in runs])
    for run, output in zip(runs, outputs, strict=True):
        wanted = recurrence(layer, run, expected)
        assert output.dtype == dtype
        assert (output.cpu() - wanted).abs().max() < _TOLERANCE[dtype] * wanted.abs().max().clamp(min=1)
        torch.testing.assert_close(output, step([run], alone))
    assert torch.equal(alone.matrices, state.matrices), "the same alone, bit for bit"
    assert (state.matrices.cpu() - expected.matrices).abs().max() < _TOLERANCE[dtype]
    assert torch.equal(state.inputs.cpu().double(), expected.inputs)


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", _SHAPES)
def test_prompts_are_the_recurrence(shape: DeltaNetConfig, dtype: torch.dtype) -> None:
    """Ragged: of one token, of about a piece, and of several; each goes on from a state, in place or not."""
    torch.manual_seed(1)
    layer = layer_of(shape)
    lengths = (1, 2, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 7)
    slots = ((0, 0), (8, 1), (8, 2), (3, 3), (4, 4), (8, 5))
    runs = [
        Run(inputs_of(layer, length, dtype), 0, source, [(length, target)])
        for length, (source, target) in zip(lengths, slots, strict=True)
    ]
    check_runs(layer, runs, dtype)


def test_states_are_kept_at_borders_and_before_drafts() -> None:
    """Also where the first border lies within the convolution's view, and where a row replays tokens of which only
    the state is wanted: none, one and several, in the slot that it goes on from.
    """
    torch.manual_seed(2)
    layer = layer_of(_SHAPES[0])
    replays = inputs_of(layer, 6, torch.float32), inputs_of(layer, 4, torch.float32)
    runs = [
        Run(inputs_of(layer, 70, torch.float32), 0, 8, [(1, 0), (2, 1), (64, 2), (70, 3)]),
        Run(inputs_of(layer, 5, torch.float32), 0, 4, [(0, 4)]),
        Run(without_z(replays[0], 1), 1, 5, [(1, 5)]),
        Run(without_z(replays[1], 3), 3, 6, [(3, 6)]),
    ]
    check_runs(layer, runs, torch.float32)


def test_decodes_next_to_a_prompt_are_a_part_of_its_launches() -> None:
    """Before and after it in the step, in their slots and from others. Torch computes them as it does a step of
    decodes.
    """
    torch.manual_seed(4)
    layer, shape = layer_of(_SHAPES[1]), _SHAPES[1]
    state, inputs = state_of(shape, torch.float32), inputs_of(layer, 3 + PIECE + 9, torch.float32)
    plain = [(0, 0, 0), (1, 8, 1), (len(inputs.z) - 1, 2, 5)]
    prompt = StateRow(2, 2, PIECE + 9, 3, 4, 0, False, [(7, 6)])
    batch = StateBatch.of([prompt], len(inputs.z), plain)
    ours, theirs = there(copy_of(state)), copy_of(state)
    expected = inputs.run(TorchDeltaHeads(shape, layer.conv, layer.norm, EPS), theirs, batch)
    heads = TritonDeltaHeads(shape, layer.conv.to(DEVICE), layer.norm.to(DEVICE), EPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "_advance_plain", None)
        found = Inputs(*(part.to(DEVICE) for part in inputs)).run(heads, ours, to_device(batch, DEVICE))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.matrices.cpu(), theirs.matrices, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.inputs.cpu(), theirs.inputs)
    others = [2, 3, 7, 8]
    assert torch.equal(ours.matrices.cpu()[others], state.matrices[others])


@pytest.mark.parametrize("decay", [0.0, -30.0, -200.0])
def test_states_that_do_not_forget_and_that_forget_all(decay: float) -> None:
    """Every second token's decay is an extreme one: exp(-200) is 0 in float32."""
    torch.manual_seed(3)
    layer = layer_of(_SHAPES[1])
    inputs = inputs_of(layer, 2 * PIECE + 1, torch.float32)
    inputs.decay[::2] = decay
    check_runs(layer, [Run(inputs, 0, 2, [(len(inputs.mixed), 2)])], torch.float32)
