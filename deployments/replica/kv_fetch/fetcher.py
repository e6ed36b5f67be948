"""Fetches pages of KV from other replicas into host memory, in its own thread, next to the engine's steps.

    engine's thread ── load ──▶ thread ── Fetch, More ──▶ the other replica
                    ◀─ finished ──      ◀── Lent, Page, Page, ..., End

Pages come in order, each with a checksum, or are read from the sender's memory (`reads.py`) and then confirmed.
When a transfer breaks off for any reason, its remaining pages count as failed: their tokens are computed. The time
for which a replica may be silent does not count while this process is suspended (`engine/base/awake_clock.py`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import zmq

from cache.node import Namespace
from deployments.config.kv_fetch import KvFetchSettings
from deployments.replica.kv_fetch import messages
from deployments.replica.kv_fetch.messages import (
    Check,
    End,
    FetchPages,
    Held,
    Lent,
    More,
    Page,
    Readable,
    Stop,
    ToSender,
)
from deployments.replica.kv_fetch.nixl_agent import NixlAgent
from deployments.replica.kv_fetch.reads import CannotRead, Reading, Reads
from deployments.wire.messages import pack_tokens
from deployments.wire.sockets import connect_peer
from deployments.wire.wake_up import WakeUp
from engine.base.awake_clock import AwakeClock
from engine.host_tier.lower_tier import Finished
from engine.host_tier.peers import PageMemory, PeerTotals
from engine.values.request import KVSource
from router.addresses import KVAddress

logger = logging.getLogger("ray.serve")

Socket = zmq.Socket[bytes]
_HEADER_BYTES = 2**20
"""Room in a message besides its page, such as for the ids of all pages of a prompt."""
_READING_MS = 1
"""Milliseconds between two looks at reads."""
_SMOOTHING = 0.2
_LOOK_S = 0.1
_IDLE_S = 60.0
"""Seconds after which an unused connection is closed."""
_STOP_S = 5.0


@dataclass(slots=True, eq=False)
class _Transfer:
    """Pages on their way here."""

    number: int
    address: KVAddress
    namespace: Namespace
    prompt_ids: bytes
    first: int
    hosts: Sequence[int]
    """The host page for each, in order."""
    began_at: float = 0.0
    heard_at: float = 0.0
    num_come: int = 0
    num_granted: int = 0
    reading: Reading | None = None
    """How its pages are read; None if they are sent."""


@dataclass(slots=True, eq=False)
class _Connection:
    """The socket to one replica, and its transfers."""

    socket: Socket
    used_at: float
    transfers: dict[int, _Transfer] = field(default_factory=dict)
    waiting: deque[_Transfer] = field(default_factory=deque)
    """Transfers that begin when others have ended."""


class KVFetcher:
    """The engine's `KVPeers`. A `KVSource.peer` is a `KVAddress`."""

    def __init__(
        self,
        memory: PageMemory,
        page_size: int,
        settings: KvFetchSettings,
        agent: NixlAgent | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`page_size` in tokens. With an agent, pages are read if the other replica has one too. `clock` is
        monotonic.
        """
        self._clock, self._awake = clock, AwakeClock(clock)  # only the thread uses the latter
        self._turn_at = self._awake.now()
        self._memory, self._settings = memory, settings
        self._page_size, self._page_bytes = page_size, memory.page_bytes
        self._window = min(max(2, int(settings.window_mib * 2**20 / self._page_bytes)), messages.MAX_WINDOW)
        self.reads: Reads | None = None
        """Reads of other replicas' memory, where there is an agent; only the thread uses them."""
        if agent is not None:
            self.reads = Reads(agent, self._page_bytes, self._window, settings.max_transfers)
        self._page_seconds = 0.0
        self._num_pending = 0  # pages; only the engine's thread uses it
        self._num_loaded = self._num_failed = self._num_fetches = self._num_failed_fetches = 0
        self._number = 0
        self._silent_until: dict[KVAddress, float] = {}
        self._wanted: deque[_Transfer] = deque()
        self._over: deque[tuple[int, bool]] = deque()
        self._on_finished: Callable[[], None] = lambda: None
        self._connections: dict[KVAddress, _Connection] = {}
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._wake_up = WakeUp()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-fetcher", daemon=True)
        self._thread.start()

    # --- from the engine's thread --------------------------------------------------------------------------

    def load(
        self, source: KVSource, namespace: Namespace, tokens: Sequence[int], first: int, hosts: Sequence[int]
    ) -> None:
        """Begin to fetch pages of a prompt, from position `first` on, into host pages."""
        assert isinstance(source.peer, KVAddress)
        self._number += 1
        self._wanted.append(
            _Transfer(self._number, source.peer, namespace, pack_tokens(tokens), first, list(hosts))
        )
        self._num_pending += len(hosts)
        self._wake_up.wake()

    def seconds(self, source: KVSource, num_pages: int) -> float:
        """Predict the seconds until `num_pages` more have arrived; 0 until that was measured."""
        assert isinstance(source.peer, KVAddress)
        if self._clock() < self._silent_until.get(source.peer, 0.0):
            return math.inf
        return (self._num_pending + num_pages) * self._page_seconds

    def finished(self) -> Finished:
        """Return the transfers that ended since the last call."""
        over = [self._over.popleft() for _ in range(len(self._over))]
        self._num_pending -= len(over)
        return Finished((), [page for page, came in over if came], [page for page, came in over if not came])

    def on_finished(self, call: Callable[[], None]) -> None:
        """Call `call`, in the fetcher's thread, whenever a transfer has ended."""
        self._on_finished = call

    # --- from any thread -----------------------------------------------------------------------------------

    def totals(self) -> PeerTotals:
        """Return the totals of fetches since the start."""
        return PeerTotals(self._num_loaded, self._num_failed, self._num_fetches, self._num_failed_fetches)

    @property
    def tokens_per_s(self) -> float:
        """Tokens whose KV a transfer brings in a second, as measured, or as estimated until then."""
        if self._page_seconds:
            return self._page_size / self._page_seconds
        return self._settings.expected_mib_per_s * 2**20 / self._page_bytes * self._page_size

    def close(self) -> None:
        """Abandon all transfers. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake_up.wake()
        self._thread.join(_STOP_S)
        self._context.destroy(linger=0)
        self._wake_up.close()
        if self.reads is not None:
            self.reads.close()

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        looked_at = self._turn_at
        while not self._closing.is_set():
            try:
                self._poll()
                now = self._turn_at = self._awake.now()
                while self._wanted:
                    self._begin(self._wanted.popleft())
                for connection in list(self._connections.values()):
                    self._receive(connection)
                    self._follow_reads(connection)
                if now - looked_at >= _LOOK_S:
                    # By the last look's clock: a turn since then has read everything that had come by then.
                    looked_at, before = now, looked_at
                    self._look(before)
            except Exception:  # a defect ends only its transfer, which then looks silent
                logger.exception("fetching KV from another replica failed")
                self._closing.wait(_LOOK_S)

    def _poll(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_up.readable, zmq.POLLIN)
        for connection in self._connections.values():
            poller.register(connection.socket, zmq.POLLIN)
        is_reading = self.reads is not None and self.reads.are_under_way
        poller.poll(_READING_MS if is_reading else int(_LOOK_S * 1000))
        self._wake_up.clear()

    def _begin(self, transfer: _Transfer) -> None:
        """Begin a transfer, or let it wait for those before it."""
        connection = self._connections.get(transfer.address)
        if connection is None:
            try:
                socket = connect_peer(self._context, transfer.address, self._page_bytes + _HEADER_BYTES)
            except Exception as error:  # after any error, the pages belong to the engine again
                logger.warning("no KV can be fetched from %s: %s", transfer.address.endpoint, error)
                self._give_up([transfer])
                return
            connection = self._connections[transfer.address] = _Connection(socket, self._turn_at)
        connection.waiting.append(transfer)
        self._ask_next(connection)

    def _ask_next(self, connection: _Connection) -> None:
        """Request waiting transfers, as many concurrently as the other replica would send."""
        while connection.waiting and len(connection.transfers) < self._settings.max_transfers:
            self._ask(connection, connection.waiting.popleft())

    def _ask(self, connection: _Connection, transfer: _Transfer) -> None:
        connection.used_at = transfer.heard_at = self._turn_at
        connection.transfers[transfer.number] = transfer
        transfer.began_at = self._awake.now()
        transfer.num_granted = self._window
        transfer.reading = None if self.reads is None else self.reads.take()
        self._num_fetches += 1
        fetch = FetchPages(
            messages.VERSION,
            transfer.number,
            self._memory.identity,
            transfer.namespace.model,
            transfer.namespace.salt,
            transfer.prompt_ids,
            transfer.first,
            self._window,
            reads=transfer.reading is not None,
        )
        if not self._post(connection, fetch):
            self._end(connection, transfer, "its connection accepts no messages")

    def _receive(self, connection: _Connection) -> None:
        """Process arrived messages, up to a window at a time."""
        for _ in range(self._window):
            try:
                header, *rest = connection.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            message = messages.decode_to_fetcher(header.bytes)
            transfer = None if message is None else connection.transfers.get(message.number)
            if message is None or transfer is None:  # its transfer was abandoned
                continue
            transfer.heard_at = connection.used_at = self._turn_at
            if isinstance(message, Page):
                self._take_page(connection, transfer, message, rest[0].buffer if rest else memoryview(b""))
            elif isinstance(message, Lent):
                self._give_back(transfer)
                self._shorten(connection, transfer, message.count)
            elif isinstance(message, Readable | Held):
                self._read_next(connection, transfer, message)
            elif isinstance(message, End):
                self._end(connection, transfer, message.reason)

    def _take_page(self, connection: _Connection, transfer: _Transfer, page: Page, data: memoryview) -> None:
        is_next = page.position == transfer.first + transfer.num_come and transfer.num_come < len(transfer.hosts)
        if not is_next or len(data) != self._page_bytes or zlib.crc32(data) != page.checksum:
            return self._break_off(connection, transfer, "it sent another page than was asked for")
        self._store(transfer, data)
        if transfer.num_come == len(transfer.hosts):
            return self._end(connection, transfer, "")
        if transfer.num_granted - transfer.num_come <= self._window // 2:
            count = self._window - (transfer.num_granted - transfer.num_come)
            transfer.num_granted += count
            self._post(connection, More(transfer.number, count))
        return None

    def _store(self, transfer: _Transfer, data: memoryview) -> None:
        """Copy a transfer's next page to its host page."""
        host = transfer.hosts[transfer.num_come]
        self._memory.write(host, data)
        transfer.num_come += 1
        self._num_loaded += 1
        self._over.append((host, True))

    def _read_next(self, connection: _Connection, transfer: _Transfer, message: Readable | Held) -> None:
        """Process the window that was read last, if there was one, and begin with the next."""
        reading = transfer.reading
        try:
            if reading is None:
                raise CannotRead("it offers to have pages read that it should send")
            if isinstance(message, Readable):
                self._shorten(connection, transfer, reading.learn(message))
            else:
                for page in reading.confirmed(message, transfer.first + transfer.num_come):
                    self._store(transfer, page)
                if transfer.num_come == len(transfer.hosts):
                    return self._end(connection, transfer, "")
            if transfer.number in connection.transfers:
                reading.begin(transfer.num_come, len(transfer.hosts) - transfer.num_come)
        except CannotRead as error:
            self._break_off(connection, transfer, str(error))
        return None

    def _follow_reads(self, connection: _Connection) -> None:
        """Ask for confirmation of the windows that were read."""
        for transfer in list(connection.transfers.values()):
            reading = transfer.reading
            try:
                if reading is None or not reading.has_ended():
                    continue
            except CannotRead as error:
                self._break_off(connection, transfer, str(error))
                continue
            check = Check(transfer.number, transfer.first + transfer.num_come, reading.num_pages)
            if not self._post(connection, check):
                self._end(connection, transfer, "its connection accepts no messages")

    def _break_off(self, connection: _Connection, transfer: _Transfer, reason: str) -> None:
        self._post(connection, Stop(transfer.number))
        self._end(connection, transfer, reason)

    def _shorten(self, connection: _Connection, transfer: _Transfer, num_lent: int) -> None:
        """Give up the pages that the other replica lacks."""
        kept, missing = transfer.hosts[:num_lent], transfer.hosts[num_lent:]
        transfer.hosts = kept
        if missing:
            self._fail(missing)
        if not kept:
            self._end(connection, transfer, "")
        elif missing:
            self._on_finished()

    def _post(self, connection: _Connection, message: ToSender) -> bool:
        try:
            connection.socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _end(self, connection: _Connection, transfer: _Transfer, reason: str) -> None:
        """End a transfer; pages that have not arrived are failed."""
        del connection.transfers[transfer.number]
        self._give_back(transfer)
        missing = transfer.hosts[transfer.num_come :]
        if transfer.num_come:
            seconds = (self._awake.now() - transfer.began_at) / transfer.num_come
            share = _SMOOTHING if self._page_seconds else 1.0
            self._page_seconds += (seconds - self._page_seconds) * share
        if missing:
            self._num_failed_fetches += 1
            logger.info(
                "%d pages of KV did not arrive from %s: %s", len(missing), transfer.address.endpoint, reason
            )
            self._fail(missing)
        self._on_finished()
        self._ask_next(connection)

    def _give_back(self, transfer: _Transfer) -> None:
        """Release the transfer's slot for other reads."""
        if transfer.reading is not None:
            transfer.reading.give_back()
            transfer.reading = None

    def _fail(self, hosts: Sequence[int]) -> None:
        self._num_failed += len(hosts)
        self._over.extend((host, False) for host in hosts)

    def _give_up(self, transfers: Iterable[_Transfer]) -> None:
        """Fail transfers that were not requested yet."""
        for transfer in transfers:
            self._num_fetches += 1
            self._num_failed_fetches += 1
            self._fail(transfer.hosts)
            self._on_finished()

    def _look(self, now: float) -> None:
        """Abandon silent transfers, and close unused connections."""
        settings = self._settings
        if self.reads is not None:
            self.reads.look(self._clock())
        for address, connection in list(self._connections.items()):
            silent = [t for t in connection.transfers.values() if now - t.heard_at > settings.silence_s]
            for transfer in silent:
                self._silent_until[address] = self._clock() + settings.retry_s
                waiting, connection.waiting = connection.waiting, deque()
                self._give_up(waiting)
                self._break_off(connection, transfer, f"it sent nothing for {settings.silence_s:g} s")
            if not connection.transfers and now - connection.used_at > _IDLE_S:
                connection.socket.close(linger=0)
                del self._connections[address]
        retried = self._clock()
        for address in [address for address, until in self._silent_until.items() if until < retried]:
            del self._silent_until[address]
