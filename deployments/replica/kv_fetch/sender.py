"""Sends pages of KV to replicas that fetch them, with its own socket and thread, apart from the engine's.

    Fetch ──▶ engine lends ──▶ Lent ──▶ Page, Page, ... as the fetcher grants them ──▶ End, and given back

A fetcher that can reads the pages itself: it receives their addresses, and after each window the confirmation that
they were still lent. A loan ends with its transfer: when all is sent or read, when the fetcher stops or asks for
nothing for `silence_s`, or when its connection is gone. Transfers take turns, a page each. No time counts while
this process is suspended (`engine/base/awake_clock.py`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Protocol

import zmq
from xxhash import xxh3_64_intdigest

from cache.node import Namespace
from deployments.config.kv_fetch import KvFetchSettings
from deployments.config.settings import WireSettings
from deployments.replica.kv_fetch import messages
from deployments.replica.kv_fetch.messages import (
    Busy,
    Check,
    End,
    FetchPages,
    Held,
    Lent,
    More,
    Page,
    Readable,
    Region,
    Stop,
    ToFetcher,
)
from deployments.replica.kv_fetch.nixl_agent import NixlAgent
from deployments.wire.handshake import Doorkeeper
from deployments.wire.messages import unpack_tokens
from deployments.wire.peers import Peers
from deployments.wire.receiver import Receiver
from deployments.wire.sockets import bind, make_router
from deployments.wire.wake_up import WakeUp
from engine.base.awake_clock import AwakeClock
from engine.base.errors import EngineStopped
from engine.host_tier.peers import LentPages, PageMemory, PageReading
from router.addresses import KVAddress

logger = logging.getLogger("ray.serve")

MAX_FETCH_BYTES, MAX_WAITING = 8 * 2**20, 2
"""Largest message of a fetcher, which has a prompt's tokens, and how many of one fetcher wait in this process."""
_MESSAGES_PER_TURN = 64
_LOOK_S = 0.1
_STOP_S = 5.0


class PageLender(Protocol):
    """The part of `EngineLoop` that a sender uses."""

    def lend(self, namespace: Namespace, tokens: Sequence[int], first: int) -> Future[LentPages]:
        """Keep whole pages of a prompt, from the one at position `first` on, unchanged. Raises EngineStopped."""

    def give_back(self, number: int) -> None:
        """End a loan. Idempotent."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """Pages on their way to one fetcher."""

    peer: bytes
    number: int
    first: int
    credit: int
    """Pages that may be sent."""
    heard_at: float
    is_read: bool = False
    """Whether the fetcher reads the pages itself."""
    is_over: bool = False
    loan: LentPages | None = None
    """None until the engine has lent the pages."""
    num_sent: int = 0
    """Pages that were sent or read."""
    pages: list[tuple[bool, int]] = field(default_factory=list)
    """Whether a page is on the device, and its id."""
    readings: deque[PageReading] = field(default_factory=deque)
    """Readings of the next pages, as many as may be sent."""


class KVSender:
    """Lends an engine's pages to other replicas. Bound in the constructor; it answers after `start`."""

    def __init__(
        self,
        host: str,
        lender: PageLender,
        memory: PageMemory,
        settings: KvFetchSettings,
        wire: WireSettings,
        agent: NixlAgent | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Fetchers may read the pages that `agent` knows. `clock` is monotonic.

        Raises OSError when no port of `wire.ports` is free.
        """
        self._lender, self._memory, self._settings = lender, memory, settings
        self._agent = agent
        self._regions = memory.regions()
        self.counts: Counter[str] = Counter()
        """Transfers "sent", "declined", "given_up", and messages that were "malformed" or "endless"; "pages";
        failed handshakes, "handshake"."""
        self._awake = AwakeClock(clock)  # only the thread uses it
        self.awake_s = self._awake.now()
        """Time for which it was awake, as of its thread's last turn."""
        self.used_at = -math.inf
        """The value of `awake_s` when the last transfer began or ended; minus infinity before any."""
        self._transfers: dict[tuple[bytes, int], _Transfer] = {}
        self._lent: deque[tuple[_Transfer, Future[LentPages]]] = deque()
        self._closing = threading.Event()
        self._context = zmq.Context(io_threads=1)
        try:
            self._doorkeeper = Doorkeeper(self._context, wire.encrypt, wire.handshake_s)
            self._socket = make_router(self._context, self._doorkeeper, MAX_FETCH_BYTES, MAX_WAITING)
            self._peers = Peers(self._socket, self.counts, (MAX_WAITING + 2) * MAX_FETCH_BYTES)
            self._receiver = Receiver(self._socket, self._peers)
            endpoint, self._peers.port = bind(self._socket, host, wire.ports)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.address = KVAddress(endpoint, self._doorkeeper.secret, self._doorkeeper.public_key)
        """The fetchers' address and keys."""
        self._wake_up = WakeUp()
        memory.on_read(self._wake_up.wake)
        self._thread = threading.Thread(target=self._run, name="kv-sender", daemon=True)

    @property
    def num_transfers(self) -> int:
        """Transfers in progress."""
        return len(self._transfers)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Give up all transfers and close the socket. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake_up.wake()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        for transfer in list(self._transfers.values()):
            self._end(transfer)
        self._memory.on_read(lambda: None)
        self._peers.close()
        self._context.destroy(linger=0)
        self._wake_up.close()

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._doorkeeper.socket, self._peers.socket, self._wake_up.readable):
            poller.register(source, zmq.POLLIN)
        looked_at = self.awake_s
        while not self._closing.is_set():
            try:
                poller.poll(0 if any(map(_is_sendable, self._transfers.values())) else int(_LOOK_S * 1000))
                now = self.awake_s = self._awake.now()
                self._wake_up.clear()
                self._doorkeeper.answer()
                self._peers.look(now)
                self._receive()
                self._take_loans()
                for transfer in list(self._transfers.values()):
                    self._send_next(transfer)
                if now - looked_at >= _LOOK_S:
                    # By the last look's clock: a turn since then has read everything that had come by then.
                    looked_at, before = now, looked_at
                    self._look(before)
            except Exception:  # no fetcher may end the thread
                logger.exception("sending KV to another replica failed")
                self._closing.wait(_LOOK_S)

    def _receive(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            received = self._receiver.receive()
            if received is None:
                return
            peer = received.identity
            message = None if received.data is None else messages.decode_to_sender(received.data)
            if message is None:
                self.counts["malformed"] += bool(peer)  # a part after the first is no message
            elif isinstance(message, FetchPages):
                self._open(peer, message)
            elif (transfer := self._transfers.get((peer, message.number))) is not None:
                self._hear(transfer, message)

    def _open(self, peer: bytes, fetch: FetchPages) -> None:
        if (peer, fetch.number) in self._transfers:
            return
        if fetch.version < messages.OLDEST_VERSION or fetch.identity != self._memory.identity:
            return self._decline(peer, fetch.number, "this replica's pages are of another kind")
        if len(self._transfers) >= self._settings.max_transfers:
            return self._decline(peer, fetch.number, "engines.kv_fetch.max_transfers transfers are in progress")
        transfer = _Transfer(peer, fetch.number, fetch.first, fetch.window, self.awake_s)
        if fetch.reads and self._agent is not None:
            transfer.is_read, transfer.credit = True, 0
        try:
            tokens = unpack_tokens(fetch.prompt_ids)
            loan = self._lender.lend(Namespace(fetch.model, salt=fetch.salt), tokens, fetch.first)
        except (ValueError, EngineStopped) as error:
            return self._decline(peer, fetch.number, str(error))
        self._transfers[peer, fetch.number] = transfer
        self.used_at = self.awake_s

        def note(done: Future[LentPages]) -> None:  # in the engine's thread
            self._lent.append((transfer, done))
            self._wake_up.wake()

        loan.add_done_callback(note)
        return None

    def _decline(self, peer: bytes, number: int, reason: str) -> None:
        self.counts["declined"] += 1
        self._post(peer, End(number, reason))

    def _hear(self, transfer: _Transfer, message: More | Stop | Check) -> None:
        transfer.heard_at = self.awake_s
        if isinstance(message, Stop):
            self.counts["given_up"] += 1
            self._end(transfer)
        elif isinstance(message, Check):
            self._confirm(transfer, message)
        elif not transfer.is_read:
            transfer.credit = min(transfer.credit + message.count, messages.MAX_WINDOW)

    def _confirm(self, transfer: _Transfer, check: Check) -> None:
        """Confirm that pages are still lent, with their checksums."""
        pages = transfer.pages[transfer.num_sent : transfer.num_sent + check.count]
        is_next = transfer.is_read and check.position == transfer.first + transfer.num_sent
        if not is_next or len(pages) != check.count:
            self.counts["malformed"] += 1
            self._post(transfer.peer, End(transfer.number, "other pages were read than are lent"))
            return self._end(transfer)
        checksums = [] if self._is_in_gpu(pages) else [self._checksum(*page) for page in pages]
        transfer.num_sent += check.count
        self.counts["pages"] += check.count
        if not self._post(transfer.peer, Held(transfer.number, check.position, checksums)):
            self._end(transfer)
        return None

    def _is_in_gpu(self, pages: Sequence[tuple[bool, int]]) -> bool:
        has_gpu = self._regions is not None and self._regions[0].gpu is not None
        return has_gpu and any(is_device for is_device, _ in pages)

    def _checksum(self, is_device: bool, page: int) -> int:
        return xxh3_64_intdigest(self._memory.reading(is_device, page).take())

    def _take_loans(self) -> None:
        """Begin the transfers whose pages the engine has lent meanwhile."""
        while self._lent:
            transfer, done = self._lent.popleft()
            try:
                loan = done.result()
            except (Exception, CancelledError) as error:
                self._post(transfer.peer, End(transfer.number, f"the engine lends nothing: {error}"))
                self._end(transfer)
                continue
            transfer.loan = loan
            if transfer.is_over:  # the fetcher has left
                self._lender.give_back(loan.number)
                continue
            transfer.pages = [(True, page) for page in loan.device] + [(False, page) for page in loan.host]
            if not self._post(transfer.peer, self._offer(transfer, loan)):
                self._end(transfer)

    def _offer(self, transfer: _Transfer, loan: LentPages) -> Lent | Readable:
        if not transfer.is_read or self._agent is None or self._regions is None:
            return Lent(transfer.number, len(transfer.pages))
        device, host = (Region(region.gpu, list(region.starts), region.stride) for region in self._regions)
        return Readable(transfer.number, self._agent.metadata, device, list(loan.device), host, list(loan.host))

    def _send_next(self, transfer: _Transfer) -> None:
        """Send a transfer's next page if it is granted; end a transfer if all its pages were sent."""
        begun = transfer.num_sent + len(transfer.readings)
        for page in transfer.pages[begun : transfer.num_sent + transfer.credit]:
            transfer.readings.append(self._memory.reading(*page))
        if _is_sendable(transfer):
            data = transfer.readings.popleft().take()
            header = Page(transfer.number, transfer.first + transfer.num_sent, zlib.crc32(data))
            if not self._post(transfer.peer, header, data):
                return self._end(transfer)
            transfer.num_sent += 1
            transfer.credit -= 1
            self.counts["pages"] += 1
        if transfer.loan is not None and transfer.num_sent == len(transfer.pages):
            self._post(transfer.peer, End(transfer.number))
            self.counts["sent"] += 1
            self._end(transfer)
        return None

    def _post(self, peer: bytes, message: ToFetcher, data: bytes | memoryview | None = None) -> bool:
        """Send a message; False if the fetcher's connection is gone or accepts nothing."""
        parts: list[bytes | memoryview] = [peer, messages.encode(message)]
        if data is not None:
            parts.append(data)
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        return True

    def _look(self, now: float) -> None:
        """Abandon transfers whose fetchers are gone or silent; keep unprocessed ones waiting."""
        for transfer in list(self._transfers.values()):
            if transfer.loan is None:
                if not self._post(transfer.peer, Busy(transfer.number)):
                    self._end(transfer)
            elif now - transfer.heard_at > self._settings.silence_s:
                self.counts["given_up"] += 1
                self._post(transfer.peer, End(transfer.number, "the fetcher has granted nothing for too long"))
                self._end(transfer)

    def _end(self, transfer: _Transfer) -> None:
        transfer.is_over = True
        self.used_at = self.awake_s
        self._transfers.pop((transfer.peer, transfer.number), None)
        if transfer.loan is not None:
            self._lender.give_back(transfer.loan.number)


def _is_sendable(transfer: _Transfer) -> bool:
    return bool(transfer.readings) and transfer.readings[0].is_ready()
