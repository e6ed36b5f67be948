"""Page memories without engines: what one lends is known, and what came to the other can be compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from cache.node import Namespace
from engine.base.errors import EngineStopped
from engine.host_tier.peers import LentPages, PageRegion

PAGE_SIZE = 4
PAGE_BYTES = 96
NUM_LAYERS = 3


class Pages:
    """A `PageMemory` of random bytes, on a device and on the host."""

    def __init__(self, seed: int, num_pages: int = 256, identity: str = "model x, 3 layers") -> None:
        shape = (NUM_LAYERS, num_pages, PAGE_BYTES // NUM_LAYERS)
        self._data = np.random.default_rng(seed).integers(0, 256, (2, *shape), dtype=np.uint8)
        self.identity, self.page_bytes = identity, PAGE_BYTES
        self.reads = 0

    def device(self, page: int) -> memoryview:
        self.reads += 1
        return memoryview(self._data[0, :, page].tobytes())

    def host(self, page: int) -> Sequence[memoryview]:
        self.reads += 1
        return [memoryview(layer[page]) for layer in self._data[1]]

    def reading(self, is_device: bool, page: int) -> Reading:
        return Reading(self, is_device, page)

    def on_read(self, call: Callable[[], None]) -> None:
        pass

    def write(self, page: int, data: memoryview) -> None:
        for piece, start in zip(self.host(page), range(0, PAGE_BYTES, PAGE_BYTES // NUM_LAYERS), strict=True):
            piece[:] = data[start : start + len(piece)]

    def regions(self) -> tuple[PageRegion, PageRegion]:
        _, num_pages, stride = self._data.shape[1:]
        device, host = (
            PageRegion(None, tuple(layer.ctypes.data for layer in kind), stride, num_pages) for kind in self._data
        )
        return device, host

    def host_bytes(self, page: int) -> bytes:
        """Return a copy of a host page."""
        return b"".join(self.host(page))


class Reading:
    """A page that is read at once."""

    def __init__(self, pages: Pages, is_device: bool, page: int) -> None:
        self._pages, self._is_device, self._page = pages, is_device, page

    def is_ready(self) -> bool:
        return True

    def take(self) -> bytes | memoryview:
        return self._pages.device(self._page) if self._is_device else self._pages.host_bytes(self._page)


class ScriptedLender:
    """Lends pages 0, 1, 2, ... of a prompt's first `num_device` pages, then host pages 100, 101, ..."""

    def __init__(self, num_device: int, num_host: int = 0) -> None:
        self._num_device, self._num_host = num_device, num_host
        self.asked: list[tuple[Namespace, list[int], int]] = []
        self.lent: set[int] = set()
        self.is_stopped = False
        self.waits: list[Future[LentPages]] | None = None
        """Loans that nobody has made yet, if they are to wait."""
        self.all_back = threading.Event()

    def lend(self, namespace: Namespace, tokens: Sequence[int], first: int) -> Future[LentPages]:
        if self.is_stopped:
            raise EngineStopped("the engine is stopping")
        self.asked.append((namespace, list(tokens), first))
        future: Future[LentPages] = Future()
        if self.waits is None:
            self.make(future)
        else:
            self.waits.append(future)
        return future

    def make(self, future: Future[LentPages]) -> None:
        """Lend what was asked for last."""
        _, tokens, first = self.asked[-1]
        last = min(self._num_device + self._num_host, len(tokens) // PAGE_SIZE)
        device = range(first, min(last, self._num_device))
        host = range(100 + max(first - self._num_device, 0), 100 + last - self._num_device)
        number = len(self.asked)
        self.lent.add(number)
        self.all_back.clear()
        future.set_result(LentPages(number, first, tuple(device), tuple(host)))

    def give_back(self, number: int) -> None:
        self.lent.discard(number)
        if not self.lent:
            self.all_back.set()
