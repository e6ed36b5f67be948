"""Reads of other replicas' pages, a window at a time, into memory that holds no engine's pages.

    take ──▶ learn ──▶ begin ──▶ has_ended ──▶ confirmed ──▶ begin ... give_back ──▶ free for others,
                                                                                     when its read has ended

An abandoned read may still write long after it was forgotten, because NIXL cannot end it. So reads write to slots,
which are not reused before their reads have ended, and pages are copied from there when they are confirmed.
If all slots are taken, pages are sent instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from deployments.replica.kv_fetch.messages import Held, Readable, Region
from deployments.replica.kv_fetch.nixl_agent import NixlAgent

_IDLE_S = 60.0
"""Seconds after which an agent without reads is forgotten."""
_NEVER_FREED: list[object] = []
"""Memory to which reads may write until this process ends."""


class CannotRead(Exception):
    """Another replica's pages cannot be read, for the reason in the message."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Memory for a window of pages."""

    memory: memoryview
    address: int
    peer: bytes = b""
    """The metadata of the agent that is read from."""
    read: Any = None
    """The read in progress."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A known agent."""

    name: str
    used_at: float


class Reading:
    """The pages of one transfer, which come through one slot."""

    def __init__(self, reads: Reads, slot: _Slot) -> None:
        self._reads, self._slot = reads, slot
        self._peer = b""
        self._parts: list[tuple[Region, list[int]]] = []
        self._region: Region | None = None
        self.num_pages = 0
        """In the window that is being read, or was read last."""

    def learn(self, message: Readable) -> int:
        """Note where the pages are; return how many. Raises CannotRead when they have another size."""
        if self._parts:
            raise CannotRead("it said twice where its pages are")
        self._peer = message.agent
        self._parts = [(message.device_region, message.device), (message.host_region, message.host)]
        for region, pages in self._parts:
            if pages and len(region.starts) * region.stride != self._reads.page_bytes:
                raise CannotRead(f"its pages do not have {self._reads.page_bytes} bytes")
        return len(message.device) + len(message.host)

    def begin(self, index: int, most: int) -> None:
        """Begin to read a window: up to `most` lent pages from `index` on, of one kind. Raises CannotRead."""
        most = min(most, self._reads.window)
        for region, pages in self._parts:
            if index < len(pages):
                wanted = pages[index : index + most]
                self._region, self.num_pages = region, len(wanted)
                return self._reads.begin(self._slot, self._peer, region, wanted)
            index -= len(pages)
        raise CannotRead("it has lent no such page")

    def has_ended(self) -> bool:
        """Return whether a window has arrived since the last call. Raises CannotRead when its read has failed."""
        if self._slot.read is None:
            return False
        has_succeeded = self._reads.end_of(self._slot)
        if has_succeeded is False:
            raise CannotRead("a read of its memory has failed")
        return bool(has_succeeded)

    def confirmed(self, held: Held, position: int) -> list[memoryview]:
        """Return the window's pages, the first at `position`. Raises CannotRead when they are other pages."""
        if self._slot.read is not None or not self.num_pages or held.position != position:
            raise CannotRead("it confirms pages that were not read")
        size = self._reads.page_bytes
        pages = [self._slot.memory[index * size : (index + 1) * size] for index in range(self.num_pages)]
        self.num_pages = 0
        is_checked = self._region is None or self._region.gpu is None or held.checksums
        if is_checked and list(map(xxh3_64_intdigest, pages)) != held.checksums:
            raise CannotRead("a page that was read differs from the page that it lent")
        return pages

    def give_back(self) -> None:
        """Release the slot for others, when its read has ended."""
        self._reads.give_back(self._slot)


class Reads:
    """The slots, and the known agents. Only the fetcher's thread uses it."""

    def __init__(self, agent: NixlAgent, page_bytes: int, window: int, num_slots: int) -> None:
        """`window` is the pages of a slot. A slot's memory is allocated when it is first read to."""
        self._agent, self.page_bytes, self.window = agent, page_bytes, window
        self._memory = np.empty((num_slots, window * page_bytes), dtype=np.uint8)
        agent.register_own(self._memory)
        self._slots = [_Slot(slot.data, slot.ctypes.data) for slot in self._memory]
        self._free = list(self._slots)
        self._given_up: list[_Slot] = []
        self._met: dict[bytes, _Peer] = {}
        self._leaving: set[bytes] = set()

    @property
    def are_under_way(self) -> bool:
        """Whether reads are in progress whose result is awaited."""
        return any(slot.read is not None for slot in self._slots if slot not in self._given_up)

    @property
    def num_given_up(self) -> int:
        """Slots to which abandoned reads may still write."""
        return len(self._given_up)

    @property
    def num_free(self) -> int:
        """Slots that no transfer has, and to which nothing is written."""
        return len(self._free)

    def take(self) -> Reading | None:
        """Return a reader for a transfer's pages; None when all slots are taken."""
        return Reading(self, self._free.pop()) if self._free else None

    def begin(self, slot: _Slot, peer: bytes, region: Region, pages: Sequence[int]) -> None:
        """Begin to read pages into a slot. Raises CannotRead."""
        starts = np.array(region.starts, dtype=np.uint64)
        offsets = np.array(pages, dtype=np.uint64) * np.uint64(region.stride)
        name = self._name_of(peer)
        slot.peer = peer
        try:
            remote = (starts[None, :] + offsets[:, None]).ravel()
            slot.read = self._agent.read(name, region.gpu, remote, slot.address, region.stride)
        except Exception as error:  # NIXL's errors have no class of their own
            self._leaving.add(peer)
            raise CannotRead(f"its memory cannot be read: {error}") from error

    def _name_of(self, metadata: bytes) -> str:
        if metadata in self._leaving:
            raise CannotRead("a read of its memory has failed before")
        peer = self._met.get(metadata)
        if peer is None:
            try:
                name = self._agent.meet(metadata)
            except Exception as error:
                raise CannotRead(f"its NIXL agent cannot be reached: {error}") from error
            if name in [each.name for each in self._met.values()]:
                raise CannotRead("its NIXL agent has the name of another agent")
            peer = self._met[metadata] = _Peer(name, 0.0)
        peer.used_at = time.monotonic()
        return peer.name

    def end_of(self, slot: _Slot) -> bool | None:
        """Return None while a slot's read is in progress, and then whether it has succeeded."""
        has_succeeded = self._agent.has_ended(slot.read)
        if has_succeeded is not None:
            if not self._agent.release(slot.read):
                return None
            slot.read = None
            if not has_succeeded:  # its connection is no longer usable
                self._leaving.add(slot.peer)
        return has_succeeded

    def give_back(self, slot: _Slot) -> None:
        """Release a slot for others, when its read has ended."""
        (self._free if slot.read is None else self._given_up).append(slot)

    def look(self, now: float) -> None:
        """Free the slots whose reads have ended; forget agents with failed reads, and idle ones."""
        for slot in self._given_up[:]:
            if self.end_of(slot) is not None:
                self._given_up.remove(slot)
                self._free.append(slot)
        self._leaving.update(peer for peer, known in self._met.items() if now - known.used_at > _IDLE_S)
        for peer in self._leaving - {slot.peer for slot in self._slots if slot.read is not None}:
            self._leaving.discard(peer)
            if (known := self._met.pop(peer, None)) is not None:
                self._agent.forget(known.name)

    def close(self) -> None:
        """Release the memory, unless reads may still write to it: that memory is kept until the process ends."""
        self.look(time.monotonic())
        if any(slot.read is not None for slot in self._slots):
            _NEVER_FREED.extend((self._agent, self._memory))
