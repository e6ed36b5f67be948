"""Copies of pages to host memory and back move every layer's keys and values, and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.attention.host_pages import HostKVPages
from engine.attention.kv_pages import KVPages
from engine.attention.state_slots import LayerState, StateSlots
from engine.model_parts.parts import DeltaNetConfig
from engine.values.plan import StateCopy

OUT = [(5, 0), (2, 1), (7, 2), (1, 6), (0, 4), (6, 5)]


def memories(dtype: torch.dtype, page_size: int = 3) -> tuple[KVPages, HostKVPages]:
    device = KVPages(4, 8, page_size, 2, 5, dtype, torch.device("cpu"))
    device.data[:] = torch.randn(device.data.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return device, HostKVPages(device, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_come_back_to_other_places_as_they_were(dtype: torch.dtype, page_size: int) -> None:
    """Neighbouring and single host pages are copied out together and back in parts, in another order."""
    device, host = memories(dtype, page_size)
    before = device.data.clone()
    host.copy_out(OUT)
    assert torch.equal(device.data, before), "copying out reads"
    device.data[:, :, :8] = torch.nan
    back = {3: 6, 0: 4, 1: 5, 4: 1, 6: 0}
    host.copy_in(list(back.items()))
    was = {page: origin for origin, page in OUT}
    for target, page in back.items():
        assert torch.equal(device.data[:, :, target], before[:, :, was[page]])
    assert torch.isnan(device.data[:, :, [2, 5, 7]]).all(), "nothing else was written"
    assert torch.equal(device.data[:, :, 8], before[:, :, 8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("room", [1, 3, 40])
def test_states_come_back_to_other_slots_as_they_were(dtype: torch.dtype, room: int) -> None:
    """Through slots for so many pages, to host pages that are not neighbours; the last page is not filled."""
    shape = DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, kernel=4)
    states = StateSlots(3, shape, 4, 2, torch.bfloat16, torch.device("cpu"))
    layers = [states.layer(index) for index in range(3)]
    generator = torch.Generator().manual_seed(1)
    for part in itertools.chain(*layers):
        part[:] = torch.randn(part.shape, generator=generator).to(part.dtype)
    pages = KVPages(4, 8, 3, 2, 5, dtype, torch.device("cpu"), states=states)
    host = HostKVPages(pages, 60, slot_bytes=room * pages.data[:, :, 0].nbytes)
    before = [LayerState(*map(torch.clone, layer)) for layer in layers]
    size, order = host.state_pages, torch.randperm(60, generator=torch.Generator().manual_seed(2)).tolist()
    assert size == -(-states.state_bytes // host.page_bytes) > 1
    first, second = tuple(order[:size]), tuple(order[size : 2 * size])
    host.copy_states_out([StateCopy(1, first), StateCopy(3, second)])
    for layer in layers:
        layer.inputs[1], layer.matrices[1] = 0, 0
    host.copy_states_in([StateCopy(0, first), StateCopy(2, second)])
    for layer, earlier in zip(layers, before, strict=True):
        for part, was in ((layer.inputs, earlier.inputs), (layer.matrices, earlier.matrices)):
            assert torch.equal(part[0], was[1]) and torch.equal(part[2], was[3])
            assert not part[1].any() and torch.equal(part[3:], was[3:])
        assert torch.equal(layer.drafts, earlier.drafts), "they are no part of a state"


def test_no_pages_are_no_work() -> None:
    device, host = memories(torch.float32)
    before = device.data.clone()
    host.copy_out([])
    host.copy_in([])
    assert torch.equal(device.data, before)


def test_measuring_changes_no_page_of_the_device() -> None:
    device, host = memories(torch.float32)
    before = device.data.clone()
    assert 0 < host.measure() < 1
    assert torch.equal(device.data, before)
