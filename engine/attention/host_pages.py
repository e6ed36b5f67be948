"""The memory behind host page ids: KV of preempted requests and evicted prefixes, and states cut in pages."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.copy_streams import CopyStreams, Event, StreamName, streams_of
from engine.attention.kv_pages import KVPages
from engine.attention.pinned import on_device, pin
from engine.values.plan import StateCopy

_NUM_SLOTS = 4
_SLOT_BYTES = 16 * 2**20
"""Size of a slot, unless a page is larger."""
_MEASURED_PAGES = 64
_ROUNDS = 5


@dataclass(slots=True)
class _Slot:
    """Memory on the device for some pages in transfer to the host or from it."""

    pages: torch.Tensor
    """uint8 [room, bytes of a page]."""
    is_free: Event | None = None
    """The event after which it may be filled again."""


class HostKVPages:
    """Host pages of the same shape and type as a device's KV pages; pinned if the device is a GPU.

        data: [num_pages, num_layers, 2 (keys, values) or 1, page_size, num_kv_heads, head_dim]

    The page comes first, in slots too, so that neighbouring pages are one piece of memory and take one transfer.

        out   pages ─ gather ─▶ slot ═ out ═▶ host      "steps" gathers: the pages may then be overwritten
        in    host ═ in ═▶ slot ─ scatter ─▶ pages      "steps" scatters: later work reads them

    A slot is room for some pages on the device; one operation gathers or scatters all layers of all its pages.
    Transfers (═) run on separate streams while steps run. Each waits only for its dependencies: the work that
    fills or empties its slot, and transfers that still use its host pages. The host does not wait. A recurrent
    state is packed into such slots as if it were pages.
    """

    def __init__(
        self,
        device_pages: KVPages,
        num_pages: int,
        streams: CopyStreams | None = None,
        slot_bytes: int = _SLOT_BYTES,
    ) -> None:
        """Allocate the pages. On a CPU, the system allocates memory as pages are first written. `streams`: None
        for those of the pages' device.
        """
        device = device_pages.raw
        num_layers, parts, num_device_pages, *page = device.shape
        self.num_pages = num_pages
        self._states = device_pages.states
        rows = device.view(-1, math.prod(page)).view(torch.uint8)
        self._device = rows if rows.shape[1] % 8 else rows.view(torch.int64)  # in as few numbers as possible
        """[num_layers * parts * pages, numbers]: a page has a row in each layer's keys, and one in its values."""
        self._first_rows = np.arange(0, len(rows), num_device_pages)
        """The rows of page 0."""
        self._streams = streams or streams_of(device.device)
        self.data = torch.empty((num_pages, num_layers, parts, *page), dtype=device.dtype)
        if device.device.type == "cuda":
            pin(self.data, self)
        self._host = self.data.flatten(1).view(torch.uint8)
        """[num_pages, bytes of a page]."""
        room = max(1, min(num_pages, slot_bytes // self.page_bytes))
        slots = torch.empty((_NUM_SLOTS, room, self.page_bytes), dtype=torch.uint8, device=device.device)
        self._slots = [_Slot(pages) for pages in slots]
        self._turn = 0
        self._filling: dict[int, Event] = {}  # host page -> the transfer that fills it, if it may still run
        self._draining: dict[int, Event] = {}  # host page -> the transfer that reads it
        self._written: Event | None = None  # the last transfer to the host

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (device, host) to the host, in all layers."""
        for slot, part in self._parts(sorted(pairs, key=itemgetter(1))):
            self._gather([device for device, _ in part], slot)
            self._send_out(slot, [host for _, host in part])

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (device, host) to the device, in all layers."""
        for slot, part in self._parts(sorted(pairs, key=itemgetter(1)), filled_by="in"):
            self._fetch_in([host for _, host in part], slot)
            self._scatter(slot, [device for device, _ in part])
            slot.is_free = self._streams.record("steps")

    def copy_states_out(self, copies: Sequence[StateCopy]) -> None:
        """Copy recurrent states to the host, each to the first `state_pages` of its pages: all, unless another
        stage of the model needs more.
        """
        for state, hosts in self._with_states(copies):
            assert self._states is not None
            packed = F.pad(
                self._states.packed(state), (0, len(hosts) * self.page_bytes - self._states.state_bytes)
            )
            pages = packed.view(len(hosts), -1)
            for slot, part in self._parts(list(enumerate(hosts))):
                first, last = part[0][0], part[-1][0] + 1
                slot.pages[: last - first] = pages[first:last]
                self._send_out(slot, [host for _, host in part])

    def copy_states_in(self, copies: Sequence[StateCopy]) -> None:
        """Copy recurrent states from the host."""
        for state, hosts in self._with_states(copies):
            assert self._states is not None
            packed = torch.empty(len(hosts) * self.page_bytes, dtype=torch.uint8, device=self._device.device)
            pages = packed.view(len(hosts), -1)
            for slot, part in self._parts(list(enumerate(hosts)), filled_by="in"):
                first, last = part[0][0], part[-1][0] + 1
                self._fetch_in([host for _, host in part], slot)
                pages[first:last] = slot.pages[: last - first]
                slot.is_free = self._streams.record("steps")
            self._states.unpack(state, packed[: self._states.state_bytes])

    def _with_states(self, copies: Sequence[StateCopy]) -> list[tuple[int, Sequence[int]]]:
        """Return each slot with the host pages that its state fills."""
        size = self.state_pages
        assert all(len(hosts) >= size for _, hosts in copies)
        return [(state, hosts[:size]) for state, hosts in copies if size]

    @property
    def state_pages(self) -> int:
        """Pages of one recurrent state; 0 in a model, or a stage of one, without any."""
        return 0 if self._states is None else -(-self._states.state_bytes // self.page_bytes)

    def _send_out(self, slot: _Slot, hosts: Sequence[int]) -> None:
        """Send the content of a slot to these host pages."""
        self._streams.wait("out", self._streams.record("steps"))
        self._wait("out", self._draining, hosts)
        with self._streams.on("out"):
            self._send(slot, hosts)
        slot.is_free = self._written = self._streams.record("out")
        self._filling.update(dict.fromkeys(hosts, slot.is_free))

    def _fetch_in(self, hosts: Sequence[int], slot: _Slot) -> None:
        """Fill a slot from these host pages, for the steps that follow."""
        self._wait("in", self._filling, hosts)
        with self._streams.on("in"):
            self._fetch(hosts, slot)
        there = self._streams.record("in")
        self._draining.update(dict.fromkeys(hosts, there))
        self._streams.wait("steps", there)

    def fence(self) -> Callable[[], None]:
        """Return a function that waits until all pages copied out so far are in host memory."""
        written = self._written
        return (lambda: None) if written is None else written.synchronize

    def _parts(
        self, pairs: Sequence[tuple[int, int]], filled_by: StreamName = "steps"
    ) -> Iterator[tuple[_Slot, Sequence[tuple[int, int]]]]:
        """Yield the pages that fit into a slot, and the slot once it is free for the stream that fills it."""
        room = len(self._slots[0].pages)
        for first in range(0, len(pairs), room):
            slot = self._slots[self._turn]
            self._turn = (self._turn + 1) % len(self._slots)
            if slot.is_free is not None:
                self._streams.wait(filled_by, slot.is_free)
            yield slot, pairs[first : first + room]

    def _wait(self, name: StreamName, using: dict[int, Event], hosts: Sequence[int]) -> None:
        for event in {id(event): event for host in hosts if (event := using.pop(host, None)) is not None}.values():
            self._streams.wait(name, event)

    def _gather(self, pages: Sequence[int], slot: _Slot) -> None:
        torch.index_select(self._device, 0, self._rows(pages), out=self._in_rows(slot, len(pages)))

    def _send(self, slot: _Slot, hosts: Sequence[int]) -> None:
        for start, stop, first in _runs(hosts):
            self._host[first : first + stop - start].copy_(slot.pages[start:stop], non_blocking=True)

    def _fetch(self, hosts: Sequence[int], slot: _Slot) -> None:
        for start, stop, first in _runs(hosts):
            slot.pages[start:stop].copy_(self._host[first : first + stop - start], non_blocking=True)

    def _scatter(self, slot: _Slot, pages: Sequence[int]) -> None:
        self._device.index_copy_(0, self._rows(pages), self._in_rows(slot, len(pages)))

    def _rows(self, pages: Sequence[int]) -> torch.Tensor:
        """Return the rows of pages of the device, page by page."""
        rows = np.array(pages, dtype=np.int64)[:, None] + self._first_rows
        return on_device(rows.ravel(), self._device.device)

    def _in_rows(self, slot: _Slot, num_pages: int) -> torch.Tensor:
        return slot.pages[:num_pages].view(self._device.dtype).view(-1, self._device.shape[1])

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return self._host.shape[1]

    @staticmethod
    def device_bytes(page_bytes: int) -> int:
        """Return the bytes of the device that pages of such a size need in transit."""
        return _NUM_SLOTS * max(page_bytes, _SLOT_BYTES)

    def identity(self, fingerprint: str) -> dict[str, str | int]:
        """Return the values that are equal in engines with compatible pages; `fingerprint`: the model's."""
        _, num_layers, *page = self.data.shape
        return {
            "model": fingerprint,
            "layers": num_layers,
            "page": " x ".join(map(str, page)),
            "dtype": str(self.data.dtype).removeprefix("torch."),
        }

    def page(self, number: int) -> memoryview:
        """Return the memory of a page, layer by layer."""
        return self._host[number].numpy().data

    def measure(self) -> float:
        """Measure the seconds to copy one of many pages in one direction. The device's pages are unchanged."""
        count = min(_MEASURED_PAGES, self.num_pages, len(self._device) // len(self._first_rows))
        pairs = [(page, page) for page in range(count)]
        seconds = []
        for _ in range(_ROUNDS + 1):
            began = time.perf_counter()
            self.copy_out(pairs)
            self.copy_in(pairs)
            if self._device.device.type == "cuda":
                torch.cuda.synchronize(self._device.device)
            seconds.append((time.perf_counter() - began) / (2 * count))
        return statistics.median(seconds[1:])  # The first round is slower because of page faults.


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of consecutive ids as (start, stop, pages[start])."""
    start = 0
    for stop in range(1, len(pages) + 1):
        if stop == len(pages) or pages[stop] != pages[stop - 1] + 1:
            yield start, stop, pages[start]
            start = stop
