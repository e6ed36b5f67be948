"""Decodes of gated delta nets by the kernel, beside the recurrence in torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from engine.kernels.triton import delta_net
from engine.models.delta_net import advance_slots
from tests.engine.support.devices import DEVICE


@pytest.mark.parametrize(("heads", "keys", "values"), [(2, 128, 128), (3, 16, 24), (1, 64, 7), (4, 96, 40)])
@pytest.mark.parametrize(("sources", "targets"), [([5, 0, 3], [5, 0, 3]), ([6, 6], [1, 4]), ([2], [2])], ids=str)
def test_states_advance_as_by_torch(
    heads: int, keys: int, values: int, sources: list[int], targets: list[int]
) -> None:
    """Rows advance where they are, or resume from a state that others read too; no other slot changes."""
    generator = torch.Generator().manual_seed(heads * values)
    rows = len(sources)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    slots = random(7, heads, keys, values)
    inputs = random(rows, heads, keys), random(rows, heads, keys) / keys**0.5, random(rows, heads, values)
    gates = -random(rows, heads).abs(), random(rows, heads).sigmoid()
    places = torch.tensor(sources, device=DEVICE), torch.tensor(targets, device=DEVICE)
    ours, theirs = slots.clone(), slots.clone()
    found = delta_net.advance_slots(ours, *places, *inputs, *gates)
    expected = advance_slots(theirs, *places, *inputs, *gates)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    others = [slot for slot in range(7) if slot not in targets]
    assert torch.equal(ours[others], slots[others])
