"""A sender and a fetcher of KV without engines, and a sender that says what a test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq

from cache.node import Namespace
from deployments.config.kv_fetch import KvFetchSettings
from deployments.config.settings import WireSettings
from deployments.replica.kv_fetch import messages
from deployments.replica.kv_fetch.fetcher import KVFetcher
from deployments.replica.kv_fetch.nixl_agent import NixlAgent
from deployments.replica.kv_fetch.sender import KVSender
from deployments.wire.handshake import Context
from engine.base.awake_clock import STILL_S
from engine.host_tier.lower_tier import Finished
from engine.values.request import KVSource
from router.addresses import KVAddress
from tests.deployments.support.lent_pages import PAGE_BYTES, PAGE_SIZE, Pages, ScriptedLender
from tests.deployments.support.wire_peer import impostor

FOR_LONG = KvFetchSettings(silence_s=60, window_mib=8 * PAGE_BYTES / 2**20)
READ_FOR_LONG = FOR_LONG.model_copy(update={"transport": "nixl"})
AT_ONCE = KvFetchSettings(silence_s=0.2, retry_s=60, window_mib=8 * PAGE_BYTES / 2**20)
STEP_S = STILL_S / 5
SPACE = Namespace("demo", salt="acme")


class Ends:
    """A sender and a fetcher, and what came of the fetches."""

    def __init__(
        self,
        lender: ScriptedLender,
        settings: KvFetchSettings = FOR_LONG,
        wire: WireSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lender, self.there, self.here = lender, Pages(1), Pages(2)
        has_nixl = settings.transport == "nixl"
        agents = [NixlAgent(pages.regions()) if has_nixl else None for pages in (self.there, self.here)]
        wire = wire or WireSettings()
        self.sender = KVSender("127.0.0.1", lender, self.there, settings, wire, agents[0], clock)
        self.sender.start()
        self.fetcher = KVFetcher(self.here, PAGE_SIZE, settings, agents[1])
        self.source = KVSource(self.sender.address, 10**6)
        self._has_changed = threading.Event()
        self.fetcher.on_finished(self._has_changed.set)
        self.loaded: list[int] = []
        self.failed: list[int] = []

    def fetch(self, first: int, hosts: list[int]) -> None:
        """Begin a fetch into `hosts`."""
        self.fetcher.load(self.source, SPACE, list(range((first + len(hosts)) * PAGE_SIZE)), first, hosts)

    def wait(self, num_over: int) -> None:
        """Wait until so many pages are over."""
        while len(self.loaded) + len(self.failed) < num_over:
            self._has_changed.wait(0.05)
            self._has_changed.clear()
            self.take()

    def take(self) -> Finished:
        finished = self.fetcher.finished()
        self.loaded += finished.loaded
        self.failed += finished.failed
        return finished

    def close(self) -> None:
        self.fetcher.close()
        self.sender.close()


def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so. Raises TimeoutError after two minutes."""
    deadline = time.monotonic() + 120
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("what was waited for has not come within two minutes")
        time.sleep(0.005)


class SteppedClock:
    """A clock that a test moves, of a thread that looks again and again."""

    def __init__(self) -> None:
        self._now, self._num_readings = 0.0, 0
        self._may_go_on = threading.Event()
        self._may_go_on.set()

    def __call__(self) -> float:
        self._may_go_on.wait()
        self._num_readings += 1
        return self._now

    def step(self, seconds: float, while_still: Callable[[], None] | None = None) -> None:
        """Let so much time pass between two readings, in which the thread stands still and something happens; then
        wait until the thread has looked several times.
        """
        self._may_go_on.clear()
        time.sleep(0.001)  # a reading that has begun
        if while_still is not None:
            while_still()
        self._now += seconds
        self._may_go_on.set()
        seen = self._num_readings
        until(lambda: self._num_readings >= seen + 3)

    def pass_awake(self, seconds: float) -> None:
        """Let time pass in which the thread looks often enough."""
        for _ in range(round(seconds / STEP_S)):
            self.step(STEP_S)


class Liar:
    """Answers a fetch with the messages that a test wants."""

    def __init__(self, answers: list[list[bytes]]) -> None:
        self._context: Context = zmq.Context()
        self._socket, address = impostor(self._context)
        self.source = KVSource(KVAddress(address.endpoint, address.secret, address.public_key), 100)
        self._answers = answers

    def answer(self) -> list[bytes]:
        """Answer the next fetch; return what the fetcher says then."""
        peer, _ = self._socket.recv_multipart()
        for parts in self._answers:
            self._socket.send_multipart([peer, *parts])
        return list(self._socket.recv_multipart()[1:])

    def asked(self) -> bytes:
        """Take a fetch; return who asks."""
        peer, _ = self._socket.recv_multipart()
        return bytes(peer)

    def heard(self) -> messages.ToSender | None:
        """Return what a fetcher says next."""
        return messages.decode_to_sender(self._socket.recv_multipart()[1])

    def say(self, peer: bytes, *parts: bytes) -> None:
        self._socket.send_multipart([peer, *parts])

    def close(self) -> None:
        self._context.destroy(linger=0)
