"""The bytes of an engine's pages for the mover between engines; the device's pages in the host's layout."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from engine.attention.host_pages import HostKVPages
from engine.attention.kv_pages import KVPages
from engine.host_tier.peers import PageRegion


class BytesOfPages:
    """Reads pages that stay unchanged meanwhile, in any thread and while the engine's steps run.

    A page is the sequence of its layers: [2 (keys, values) or 1, page_size, num_kv_heads, head_dim] each.
    """

    def __init__(self, pages: KVPages, host: HostKVPages, fingerprint: str) -> None:
        """`fingerprint` is the model's."""
        self.identity = json.dumps(host.identity(fingerprint), sort_keys=True)
        """Equal in engines that can use each other's pages."""
        self.page_bytes = host.page_bytes
        self._host = host
        self._pages = pages.raw
        self._stream = torch.cuda.Stream(pages.data.device) if pages.data.device.type == "cuda" else None

    @torch.inference_mode()
    def device(self, page: int) -> memoryview:
        """Return a copy of a page of the device. On a GPU a separate stream copies it while steps run."""
        layers = self._pages[:, :, page]
        if self._stream is None:
            # numpy copies only in this thread; torch would start threads that compete with those of the steps.
            return layers.view(torch.uint8).numpy().flatten().data
        with torch.cuda.stream(self._stream):
            copy = torch.empty(layers.shape, dtype=layers.dtype, pin_memory=True)
            copy.copy_(layers.contiguous(), non_blocking=True)
        self._stream.synchronize()
        return copy.view(torch.uint8).flatten().numpy().data

    def host(self, page: int) -> memoryview:
        """Return the memory of a host page."""
        return self._host.page(page)

    def reading(self, is_device: bool, page: int) -> PageNow:
        """Implement `PageMemory`."""
        return PageNow(self, is_device, page)

    def on_read(self, call: Callable[[], None]) -> None:
        """Implement `PageMemory`: pages are always ready."""

    def write(self, page: int, data: memoryview) -> None:
        """Implement `PageMemory`."""
        self.host(page)[:] = data

    def regions(self) -> tuple[PageRegion, PageRegion]:
        """Return the regions of the device's pages, each layer's keys and values a piece, and of the host's."""
        return _region(self._pages.flatten(0, 1)), _region(self._host.data[None])


class PageNow:
    """A page that is read when `take` is called."""

    def __init__(self, memory: BytesOfPages, is_device: bool, page: int) -> None:
        self._memory, self._is_device, self._page = memory, is_device, page

    def is_ready(self) -> bool:
        """Implement `PageReading`."""
        return True

    def take(self) -> bytes | memoryview:
        """Implement `PageReading`."""
        return self._memory.device(self._page) if self._is_device else bytes(self._memory.host(self._page))


def _region(pages: torch.Tensor) -> PageRegion:
    """Return the region of pages with the memory [num_pieces, num_pages, ...]."""
    gpu = pages.device.index if pages.device.type == "cuda" else None
    return PageRegion(gpu, tuple(piece.data_ptr() for piece in pages), pages[0, 0].nbytes, pages.shape[1])
