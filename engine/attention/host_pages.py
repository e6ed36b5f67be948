"""The memory behind host page ids, which holds the KV of preempted requests and of evicted prefixes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engine.attention.batch import on_device
from engine.attention.kv_pages import KVPages

_MEASURED_PAGES = 64
_ROUNDS = 5


class HostKVPages:
    """Host pages of the same shape and type as a device's KV pages; pinned if the device is a GPU.

        data: [num_layers, num_pages, 2 (keys, values) or 1, page_size, num_kv_heads, head_dim]

    Pages come before keys and values, so that neighbouring pages of a layer are one piece of memory: a request's
    pages are gathered on the device and transferred at once per layer, or in a few parts where its host pages are
    not neighbours. Copies are queued on the device's stream, in order with the steps; nothing here waits.
    """

    def __init__(self, device_pages: KVPages, num_pages: int) -> None:
        """Allocate the pages. On a CPU, memory is taken from the system as pages are first written."""
        device = device_pages.raw
        num_layers, parts, _, *page = device.shape
        self.num_pages = num_pages
        self._device = device
        self.data = torch.empty(
            (num_layers, num_pages, parts, *page), dtype=device.dtype, pin_memory=device.device.type == "cuda"
        )

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (device, host) to the host, in all layers."""
        if not pairs:
            return
        sources = on_device(np.array([device for device, _ in pairs], dtype=np.int64), self._device.device)
        for layer, host in zip(self._device, self.data, strict=True):
            gathered = layer.index_select(1, sources).transpose(0, 1).contiguous()
            for start, stop, first in _runs([page for _, page in pairs]):
                host[first : first + stop - start].copy_(gathered[start:stop], non_blocking=True)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (device, host) to the device, in all layers."""
        if not pairs:
            return
        targets = on_device(np.array([device for device, _ in pairs], dtype=np.int64), self._device.device)
        for layer, host in zip(self._device, self.data, strict=True):
            gathered = host.new_empty((len(pairs), *host.shape[1:]), device=self._device.device)
            for start, stop, first in _runs([page for _, page in pairs]):
                gathered[start:stop].copy_(host[first : first + stop - start], non_blocking=True)
            layer.index_copy_(1, targets, gathered.transpose(0, 1))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return self.data[:, 0].nbytes

    def identity(self, fingerprint: str) -> dict[str, str | int]:
        """Return what engines must have in common to use each other's pages; `fingerprint` is their model's."""
        num_layers, _, *page = self.data.shape
        return {
            "model": fingerprint,
            "layers": num_layers,
            "page": " x ".join(map(str, page)),
            "dtype": str(self.data.dtype).removeprefix("torch."),
        }

    def pieces(self, page: int) -> list[memoryview]:
        """Return the memory of a page, layer by layer."""
        return [memoryview(layer[page].view(torch.uint8).flatten().numpy()) for layer in self.data]

    def measure(self) -> float:
        """Measure the seconds to copy one page one way, as one of many. The device's pages are unchanged."""
        count = min(_MEASURED_PAGES, self.num_pages, self._device.shape[2])
        pairs = [(page, page) for page in range(count)]
        seconds = []
        for _ in range(_ROUNDS + 1):
            began = time.perf_counter()
            self.copy_out(pairs)
            self.copy_in(pairs)
            if self._device.device.type == "cuda":
                torch.cuda.synchronize(self._device.device)
            seconds.append((time.perf_counter() - began) / (2 * count))
        return statistics.median(seconds[1:])  # The first round faults the memory in.


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of consecutive ids as (start, stop, pages[start])."""
    start = 0
    for stop in range(1, len(pages) + 1):
        if stop == len(pages) or pages[stop] != pages[stop - 1] + 1:
            yield start, stop, pages[start]
            start = stop
