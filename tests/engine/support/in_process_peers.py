"""Moves KV between whole engines of one process, whose loops run: a thread for each engine that fetches."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from cache import Namespace
from engine.host_tier.lower_tier import Finished
from engine.host_tier.peers import LentPages, PageMemory, PeerTotals
from engine.program.engine import Engine
from engine.values.request import KVSource

_Fetch = tuple[KVSource, Namespace, list[int], int, list[int]]


class InProcessPeers:
    """Copies what other engines lend into the host pages of the one that fetches."""

    def __init__(self, receiver: Engine, **sources: Engine) -> None:
        self._receiver, self._sources = receiver, sources
        self.is_open = threading.Event()
        """Pages arrive while this is set."""
        self.is_open.set()
        self.most = 10**6
        """Pages of a fetch that arrive before its source is gone."""
        self.num_pages: list[int] = []
        """Of each fetch that is over, what came of the device and of the host together."""
        self.is_closed = False
        self._to_fetch: queue.SimpleQueue[_Fetch | None] = queue.SimpleQueue()
        self._over: deque[tuple[int, bool]] = deque()
        self._call: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def load(
        self, source: KVSource, namespace: Namespace, tokens: Sequence[int], first: int, hosts: Sequence[int]
    ) -> None:
        self._to_fetch.put((source, namespace, list(tokens), first, list(hosts)))

    def seconds(self, source: KVSource, num_pages: int) -> float:
        return 0.0

    def finished(self) -> Finished:
        over = [self._over.popleft() for _ in range(len(self._over))]
        return Finished((), [page for page, ok in over if ok], [page for page, ok in over if not ok])

    def on_finished(self, call: Callable[[], None]) -> None:
        self._call = call

    def totals(self) -> PeerTotals:
        return PeerTotals(loaded=sum(self.num_pages), fetches=len(self.num_pages))

    def close(self) -> None:
        self.is_closed = True
        self.is_open.set()
        self._to_fetch.put(None)
        self._thread.join(60)

    def _run(self) -> None:
        while (fetch := self._to_fetch.get()) is not None:
            self._fetch(*fetch)
            self._call()

    def _fetch(
        self, source: KVSource, namespace: Namespace, tokens: list[int], first: int, hosts: list[int]
    ) -> None:
        engine = self._sources[str(source.peer)]
        lent = engine.loop.lend(namespace, tokens, first).result(60)
        theirs, ours = engine.runner.page_memory, self._receiver.runner.page_memory
        assert theirs is not None and ours is not None and theirs.identity == ours.identity
        pages = read_pages(theirs, lent)
        self.num_pages.append(len(pages[: self.most]))
        for number, host in enumerate(hosts):
            self.is_open.wait()
            is_there = number < min(len(pages), self.most)
            if is_there:
                ours.write(host, memoryview(pages[number]))
            self._over.append((host, is_there))
        engine.loop.give_back(lent.number)


def read_pages(memory: PageMemory, lent: LentPages) -> list[bytes]:
    """Read what is lent, the parts of all ranks."""
    readings = [memory.reading(True, page) for page in lent.device]
    readings += [memory.reading(False, page) for page in lent.host]
    while not all(reading.is_ready() for reading in readings):
        time.sleep(0.001)
    return [bytes(reading.take()) for reading in readings]
