"""Copies of pages to host memory and back move every layer's keys and values, and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.host_pages import HostKVPages
from engine.attention.kv_pages import KVPages
from engine.attention.state_slots import LayerState, StateSlots
from engine.model_parts.parts import DeltaNetConfig
from engine.values.plan import StateCopy
from tests.engine.support.devices import DEVICE
from tests.engine.support.operations_seen import Operations

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
OUT = [(5, 0), (2, 1), (7, 2), (1, 6), (0, 4), (6, 5)]


def memories(dtype: torch.dtype, page_size: int = 3) -> tuple[KVPages, HostKVPages]:
    device = KVPages(4, 8, page_size, 2, 5, dtype, DEVICE)
    fill(device)
    return device, HostKVPages(device, 7)


def fill(pages: KVPages) -> None:
    """Write random numbers, in the null page too."""
    numbers = torch.randn(pages.data.shape, generator=torch.Generator().manual_seed(1))
    pages.data[:] = numbers.to(DEVICE, pages.data.dtype)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="there is no CUDA device here")
def test_host_pages_are_pinned_and_take_no_more_memory_than_they_need() -> None:
    """torch's allocator of pinned memory would round up to a power of two."""
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    _, host = memories(torch.bfloat16)
    assert host.data.is_pinned()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("room", [1, 3, 40])
def test_states_come_back_to_other_slots_as_they_were(dtype: torch.dtype, room: int) -> None:
    """Through slots for so many pages, to host pages that are not neighbours; the last page is not filled."""
    shape = DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, kernel=4)
    states = StateSlots(3, shape, 4, 2, torch.bfloat16, DEVICE)
    layers = [states.layer(index) for index in range(3)]
    generator = torch.Generator().manual_seed(1)
    for part in itertools.chain(*layers):
        part[:] = torch.randn(part.shape, generator=generator).to(part)
    pages = KVPages(4, 8, 3, 2, 5, dtype, DEVICE, states=states)
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


PAIRS = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 6)),
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
    max_size=7,
)


@given(
    out=PAIRS,
    back=PAIRS,
    room=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    parts=st.integers(1, 2),
    heads=st.sampled_from([(3, 1, 5), (4, 2, 8)]),
)
def test_any_pages_through_slots_of_any_size(
    out: list[tuple[int, int]],
    back: list[tuple[int, int]],
    room: int,
    dtype: torch.dtype,
    parts: int,
    heads: tuple[int, int, int],
) -> None:
    """Exactly the named pages are copied, in all layers, and a host page has the layers in their order."""
    device = KVPages(3, 8, *heads, dtype, DEVICE, parts=parts)
    fill(device)
    expected = device.raw.clone()
    host = HostKVPages(device, 7, slot_bytes=room * device.data[:, :, 0].nbytes)
    host.data.zero_()
    kept = host.data.clone()
    host.copy_out(out)
    host.fence()()
    for page, number in out:
        kept[number] = expected[:, :, page].cpu()
    assert same(host.data, kept) and same(device.raw, expected)
    host.copy_in(back)
    for page, number in back:
        expected[:, :, page] = kept[number].to(DEVICE)
    assert same(device.raw, expected) and same(host.data, kept)


def same(numbers: torch.Tensor, others: torch.Tensor) -> bool:
    return torch.equal(numbers.view(torch.uint8), others.view(torch.uint8))


def test_a_run_of_pages_is_one_transfer_and_a_slot_one_operation() -> None:
    """However many layers a page has: host pages 0 to 2, 4 and 6 are three runs."""
    _, host = memories(torch.bfloat16)
    pairs = [(5, 6), (2, 1), (7, 2), (1, 4), (0, 0)]
    for copy, operation in ((host.copy_out, "aten.index_select.out"), (host.copy_in, "aten.index_copy_.default")):
        with Operations() as operations:
            copy(pairs)
        moves = {name: n for name, n in operations.counts.items() if name.startswith(("aten.copy_", "aten.index"))}
        assert moves == {operation: 1, "aten.copy_.default": 3}


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
