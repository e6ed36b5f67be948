"""Pages as bytes: those of the device read like those of the host."""

from __future__ import annotations

import ctypes
import json
import threading

import pytest
import torch

from engine.attention.host_pages import HostKVPages
from engine.attention.kv_pages import KVPages
from engine.attention.page_memory import BytesOfPages

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def memories(dtype: torch.dtype, device: str = "cpu", head_dim: int = 5) -> tuple[KVPages, HostKVPages]:
    pages = KVPages(4, 8, 3, 2, head_dim, dtype, torch.device(device))
    numbers = torch.randn(pages.data.shape, generator=torch.Generator().manual_seed(1))
    pages.data[:] = numbers.to(device=device, dtype=dtype)
    return pages, HostKVPages(pages, 7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_page_of_the_device_has_the_bytes_that_it_has_on_the_host(dtype: torch.dtype, device: str) -> None:
    pages, host = memories(dtype, device)
    memory = BytesOfPages(pages, host, "f")
    host.copy_out([(page, page - 1) for page in range(1, 8)])
    if device == "cuda":
        torch.cuda.synchronize()
    for page in range(1, 8):
        content = memory.device(page)
        assert content.nbytes == memory.page_bytes and content.contiguous
        assert content == memory.host(page - 1) == host.page(page - 1)


def test_it_is_a_copy_of_the_device_and_the_memory_of_the_host() -> None:
    pages, host = memories(torch.float32)
    memory = BytesOfPages(pages, host, "f")
    content = memory.device(3)
    before = bytes(content)
    pages.data.zero_()
    assert bytes(content) == before != bytes(memory.device(3))
    memory.host(2)[:] = bytes(memory.page_bytes)
    assert not host.data[2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_bytes_of_pages_lie_where_it_says(dtype: torch.dtype) -> None:
    pages, host = memories(dtype)
    memory = BytesOfPages(pages, host, "f")
    host.copy_out([(page, page - 1) for page in range(1, 8)])
    for region, read in zip(memory.regions(), (memory.device, host.page), strict=True):
        assert region.gpu is None and len(region.starts) * region.stride == memory.page_bytes
        for page in (0, 3, 6):
            lies = (ctypes.string_at(start + page * region.stride, region.stride) for start in region.starts)
            assert b"".join(lies) == bytes(read(page))
    assert [region.num_pages for region in memory.regions()] == [9, 7]  # the null page is the device's last


def test_other_threads_read_it() -> None:
    pages, host = memories(torch.bfloat16)
    memory = BytesOfPages(pages, host, "f")
    found: dict[int, bytes] = {}
    threads = [
        threading.Thread(target=lambda page=page: found.update({page: bytes(memory.device(page))}))
        for page in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {page: bytes(memory.device(page)) for page in range(8)}


def test_the_identity_tells_models_layouts_and_types_apart() -> None:
    identities = {
        BytesOfPages(*memories(dtype, head_dim=head_dim), fingerprint).identity
        for dtype in (torch.float32, torch.bfloat16)
        for head_dim in (5, 6)
        for fingerprint in ("f", "g")
    }
    assert len(identities) == 8
    same = BytesOfPages(*memories(torch.float32), "f").identity
    assert same in identities and json.loads(same)["page"] == "2 x 3 x 2 x 5"
