"""Copies of pages to host memory and back move every layer's keys and values, and nothing else."""

from __future__ import annotations

import pytest
import torch

from engine.attention.host_pages import HostKVPages
from engine.attention.kv_pages import KVPages

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
