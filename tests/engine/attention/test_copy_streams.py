"""Copies to host memory and back run beside steps, and every two that touch the same memory have an order.

Streams are replaced by some that note what happens before what, as a race detector does: each has a clock of how
much it knows of the others, an event is such a clock, and who waits for it knows as much from then on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.copy_streams import CopyStreams, CudaStreams, StreamName
from engine.attention.host_pages import HostKVPages
from engine.attention.kv_pages import KVPages
from tests.support.examples import examples

NUM_PAGES, NUM_HOST, ROOM = 6, 5, 2


class Point(Counter[str]):
    """What is known of each stream at some point: how many of its operations are done."""

    def synchronize(self) -> None:
        """The host waits."""


class NotingStreams:
    """Implements `CopyStreams`; raises AssertionError for accesses without an order."""

    def __init__(self) -> None:
        self.known: dict[str, Counter[str]] = defaultdict(Counter)
        self.reads: dict[Hashable, list[tuple[str, int]]] = defaultdict(list)
        self.writes: dict[Hashable, tuple[str, int]] = {}
        self.current: StreamName = "steps"
        self.waits: list[tuple[str, str]] = []

    @contextmanager
    def on(self, name: StreamName) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before

    def record(self, name: StreamName) -> Point:
        return Point(self.known[name])

    def wait(self, name: StreamName, event: Any) -> None:
        self.known[name] |= event

    def reads_and_writes(self, reads: Sequence[Hashable], writes: Sequence[Hashable]) -> None:
        """Note an operation of the current stream."""
        clock = self.known[self.current]
        clock[self.current] += 1
        for place in [*reads, *writes]:
            if place in self.writes:
                self._is_before(self.writes[place], clock, place)
        for place in writes:
            for read in self.reads.pop(place, []):
                self._is_before(read, clock, place)
            self.writes[place] = self.current, clock[self.current]
        for place in reads:
            self.reads[place].append((self.current, clock[self.current]))

    def _is_before(self, other: tuple[str, int], clock: Counter[str], place: Hashable) -> None:
        stream, number = other
        assert clock[stream] >= number, f"{self.current} uses {place} while {stream} still may"


class NotedPages(HostKVPages):
    """Says which memory each part of a copy reads and writes."""

    noting: NotingStreams

    def _slot_number(self, slot: Any) -> tuple[str, int]:
        return "slot", [other is slot for other in self._slots].index(True)

    def _gather(self, pages: Sequence[int], slot: Any) -> None:
        self.noting.reads_and_writes([("page", page) for page in pages], [self._slot_number(slot)])
        super()._gather(pages, slot)

    def _send(self, slot: Any, hosts: Sequence[int]) -> None:
        self.noting.reads_and_writes([self._slot_number(slot)], [("host", host) for host in hosts])
        super()._send(slot, hosts)

    def _fetch(self, hosts: Sequence[int], slot: Any) -> None:
        self.noting.reads_and_writes([("host", host) for host in hosts], [self._slot_number(slot)])
        super()._fetch(hosts, slot)

    def _scatter(self, slot: Any, pages: Sequence[int]) -> None:
        self.noting.reads_and_writes([self._slot_number(slot)], [("page", page) for page in pages])
        super()._scatter(slot, pages)


class World:
    """Pages whose numbers say who wrote them last."""

    def __init__(self) -> None:
        self.streams = NotingStreams()
        self.device = KVPages(2, NUM_PAGES, 3, 1, 2, torch.float32, torch.device("cpu"))
        page_bytes = self.device.data[:, :, 0].nbytes
        self.host = NotedPages(self.device, NUM_HOST, self.streams, slot_bytes=ROOM * page_bytes)
        self.host.noting = self.streams
        self.held, self.kept = [0.0] * NUM_PAGES, [0.0] * NUM_HOST
        self.host.data.zero_()
        self.written = 0.0

    def step(self, pages: Sequence[int]) -> None:
        """A step reads pages and then writes them anew."""
        places = [("page", page) for page in pages]
        self.streams.reads_and_writes(places, places)
        for page in pages:
            self.written += 1
            self.held[page] = self.written
            self.device.data[:, :, page] = self.written

    def out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.host.copy_out(pairs)
        for page, host in pairs:
            self.kept[host] = self.held[page]

    def back(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.host.copy_in(pairs)
        for page, host in pairs:
            self.held[page] = self.kept[host]

    def check(self) -> None:
        assert self.device.data[0, 0, :NUM_PAGES, 0, 0, 0].tolist() == self.held
        assert self.host.data[:, -1, 1, 2, 0, 1].tolist() == self.kept


_PAGE, _HOST = st.integers(0, NUM_PAGES - 1), st.integers(0, NUM_HOST - 1)
_STEP = st.tuples(st.just("step"), st.lists(_PAGE, min_size=1, max_size=3, unique=True))


def _pairs(kind: str) -> Any:
    unique = (lambda pair: pair[0], lambda pair: pair[1])
    pairs = st.lists(st.tuples(_PAGE, _HOST), min_size=1, max_size=NUM_HOST, unique_by=unique)
    return st.tuples(st.just(kind), pairs)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.one_of(_STEP, _pairs("out"), _pairs("back")), max_size=12))
def test_no_two_uses_of_the_same_memory_are_without_order(actions: list[tuple[str, Any]]) -> None:
    """Copies wait for the steps that write their pages, steps for the pages that they read, and reuse for both."""
    world = World()
    for kind, what in actions:
        getattr(world, kind)(what)
        world.check()


def test_steps_do_not_wait_for_copies_to_the_host() -> None:
    """Its pages are used again at once; a page that comes back from there waits for it."""
    world = World()
    world.step([0, 1])
    world.out([(0, 3), (1, 4)])
    world.step([0, 1])
    known = world.streams.known
    assert known["out"]["steps"] == 2 and known["steps"]["out"] == 0
    world.back([(2, 3)])
    assert known["in"]["out"] == 1 and known["steps"]["in"] == 1


def test_transfers_from_the_host_do_not_wait_for_steps() -> None:
    world = World()
    world.step([0])
    world.back([(2, 1)])
    assert world.streams.known["in"]["steps"] == 0, "they begin while a step runs"
    assert world.streams.known["steps"]["in"] == 1


def test_a_copy_that_does_not_wait_is_noticed() -> None:
    """The streams of this test see a copy without an order."""
    world = World()
    world.streams.wait = lambda *_: None  # type: ignore[method-assign]
    world.step([0])
    with pytest.raises(AssertionError, match=r"out uses .* while steps still may"):
        world.out([(0, 0)])


def test_the_streams_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are recorded on the stream that is named, and waited for by the other; nothing waits on the host."""
    said: list[tuple[str, str]] = []

    class Stream:
        names = iter(["out", "in"])

        def __init__(self, device: Any = None) -> None:
            self.name = "steps" if device is None else next(self.names)

        def wait_event(self, event: Event) -> None:
            said.append((self.name, f"waits for {event.name}"))

    class Event:
        name = ""

        def record(self, stream: Stream) -> None:
            self.name = stream.name
            said.append((stream.name, "records"))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        said.append((stream.name, "begins"))
        yield

    steps = Stream()
    fakes = {"Stream": Stream, "Event": Event, "stream": on, "current_stream": lambda device: steps}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    streams: CopyStreams = CudaStreams(torch.device("cuda"))
    streams.wait("out", streams.record("steps"))
    with streams.on("out"):
        streams.wait("steps", streams.record("in"))
    assert said == [
        ("steps", "records"), ("out", "waits for steps"), ("out", "begins"), ("in", "records"),
        ("steps", "waits for in"),
    ]  # fmt: skip
