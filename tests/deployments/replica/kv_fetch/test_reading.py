"""KV that a replica reads in another's memory: what counts as come, and what becomes of a read that never ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import zmq
from xxhash import xxh3_64_intdigest

from deployments.config.kv_fetch import KvFetchSettings
from deployments.replica.kv_fetch import messages
from deployments.replica.kv_fetch.exchange import check_transport
from deployments.replica.kv_fetch.fetcher import KVFetcher
from deployments.replica.kv_fetch.messages import Check, End, FetchPages, Held, Readable, Region
from deployments.replica.kv_fetch.nixl_agent import NixlAgent
from deployments.replica.kv_fetch.reads import Reads
from deployments.wire.handshake import Context
from deployments.wire.sockets import connect_peer
from tests.deployments.support.kv_ends import AT_ONCE, FOR_LONG, READ_FOR_LONG, SPACE, Ends, Liar, until
from tests.deployments.support.lent_pages import PAGE_SIZE, Pages, ScriptedLender
from tests.deployments.support.pages_elsewhere import keep_pages

WINDOW = 8
READ_AT_ONCE = AT_ONCE.model_copy(update={"transport": "nixl"})


class Source:
    """A sender that says what a test wants, with real pages and a real agent."""

    def __init__(self) -> None:
        self.pages, self.liar = Pages(1), Liar([])
        self.agent = NixlAgent(self.pages.regions())
        device, host = self.pages.regions()
        self.device = Region(None, list(device.starts), device.stride)
        self.host = Region(None, list(host.starts), host.stride)

    def readable(self, num_pages: int) -> Readable:
        return Readable(1, self.agent.metadata, self.device, list(range(num_pages)), self.host, [])

    def elsewhere(self, region: Region, pages: Sequence[int] = (0, 1)) -> Readable:
        return Readable(1, self.agent.metadata, region, list(pages), self.host, [])

    def held(self, position: int, count: int) -> Held:
        pages = range(position, position + count)
        return Held(1, position, [xxh3_64_intdigest(self.pages.device(page)) for page in pages])


class Receiver:
    """A fetcher that reads."""

    def __init__(self, settings: KvFetchSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.pages = Pages(2)
        self.fetcher = KVFetcher(self.pages, PAGE_SIZE, settings, NixlAgent(self.pages.regions()), clock)
        self.has_ended = threading.Event()
        self.fetcher.on_finished(self.has_ended.set)

    def fetch(self, source: Liar, hosts: list[int]) -> bytes:
        """Begin to fetch; return who asks."""
        self.fetcher.load(source.source, SPACE, list(range(len(hosts) * PAGE_SIZE)), 0, hosts)
        return source.asked()

    @property
    def reads(self) -> Reads:
        assert self.fetcher.reads is not None
        return self.fetcher.reads


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.liar.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver(READ_FOR_LONG)
    yield made
    made.fetcher.close()


def test_pages_are_come_when_the_other_has_confirmed_that_they_were_lent(
    source: Source, receiver: Receiver
) -> None:
    before = [receiver.pages.host_bytes(page) for page in range(10)]
    liar = source.liar
    peer = receiver.fetch(liar, list(range(10)))
    liar.say(peer, messages.encode(source.readable(10)))
    assert liar.heard() == Check(1, 0, WINDOW)  # all of it has been read
    assert [receiver.pages.host_bytes(page) for page in range(10)] == before
    assert not receiver.fetcher.finished().loaded
    liar.say(peer, messages.encode(source.held(0, WINDOW)))
    assert liar.heard() == Check(1, WINDOW, 2)
    assert receiver.fetcher.finished().loaded == list(range(WINDOW))
    liar.say(peer, messages.encode(End(1, "lent no more")))
    assert receiver.has_ended.wait(60)
    assert receiver.fetcher.finished().failed == [8, 9]
    wanted = [bytes(source.pages.device(page)) for page in range(WINDOW)]
    assert [receiver.pages.host_bytes(page) for page in range(10)] == wanted + before[WINDOW:]


@pytest.mark.parametrize(
    "lie",
    [
        lambda source: [Held(1, 0, [])],
        lambda source: [Readable(1, b"nothing", source.device, [0, 1], source.host, [])],
        lambda source: [source.elsewhere(Region(None, [2**40] * 3, 32))],
        lambda source: [source.elsewhere(source.device, [0, 2**20])],
        lambda source: [source.elsewhere(Region(None, [2**62], 96), [2**31] * 2)],
        lambda source: [source.elsewhere(Region(None, [2**40], 32))],
        lambda source: [source.elsewhere(Region(0, [2**40], 96))],
        lambda source: [source.readable(2), Held(1, 1, [])],
        lambda source: [source.readable(2), Held(1, 0, [1, 2])],
        lambda source: [source.readable(2), Held(1, 0, [])],
        lambda source: [source.readable(2), source.readable(2)],
    ],
    ids=[
        "nothing was read", "metadata", "addresses", "pages", "too high", "bytes", "no GPU", "position",
        "checksum", "no checksum", "twice",
    ],
)  # fmt: skip
def test_pages_other_than_those_lent_fail_and_nothing_is_kept(
    source: Source, receiver: Receiver, lie: Callable[[Source], list[messages.ToFetcher]]
) -> None:
    before = [receiver.pages.host_bytes(page) for page in (3, 4)]
    peer = receiver.fetch(source.liar, [3, 4])
    for number, message in enumerate(lie(source)):
        if number and isinstance(message, Held):
            assert isinstance(source.liar.heard(), Check)
        source.liar.say(peer, messages.encode(message))
    assert receiver.has_ended.wait(60)
    while not isinstance(source.liar.heard(), messages.Stop):
        pass
    assert receiver.fetcher.finished().failed == [3, 4]
    assert receiver.fetcher.totals() == (0, 2, 1, 1)
    assert [receiver.pages.host_bytes(page) for page in (3, 4)] == before
    until(lambda: not receiver.reads.num_given_up and receiver.reads.num_free == READ_FOR_LONG.max_transfers)


@pytest.fixture
def process() -> Iterator[tuple[int, bytes]]:
    """A process that has the same pages as `source`: its id, and what it has to say of 12 of them."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    started = context.Process(target=keep_pages, args=(there,))
    started.start()
    assert started.pid is not None
    yield started.pid, here.recv()
    started.kill()
    started.join()


def test_a_process_that_ends_in_the_midst_of_a_read_fails_its_pages_and_writes_to_no_page(
    monkeypatch: pytest.MonkeyPatch, source: Source, request: pytest.FixtureRequest
) -> None:
    """It stands still, so that it has certainly not answered. The clock is the test's."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # by which nothing is read without its doing
    pid, readable = request.getfixturevalue("process")
    now, hosts = [0.0], list(range(10, 22))
    receiver = Receiver(READ_FOR_LONG, lambda: now[0])
    request.addfinalizer(receiver.fetcher.close)
    before = [receiver.pages.host_bytes(page) for page in hosts]

    peer = receiver.fetch(source.liar, hosts)
    source.liar.say(peer, readable)
    assert source.liar.heard() == Check(1, 0, WINDOW)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)  # all its threads stand still
    source.liar.say(peer, messages.encode(source.held(0, WINDOW)))
    until(lambda: receiver.fetcher.totals().loaded == WINDOW)
    until(lambda: receiver.reads.are_under_way or receiver.has_ended.is_set())
    while not receiver.has_ended.wait(0.005):
        now[0] += 0.4
    finished = receiver.fetcher.finished()
    assert (finished.loaded, finished.failed) == (hosts[:WINDOW], hosts[WINDOW:])
    # The pages are the engine's again, and the slot is nobody's while something may be written to it: until UCX
    # finds that nobody answers, which may be before or after the clock does.
    assert all(slot.read is None for slot in receiver.reads._free)
    assert isinstance(source.liar.heard(), messages.Stop)

    os.kill(pid, signal.SIGKILL)
    while receiver.reads.num_given_up:
        now[0] += 0.4
        time.sleep(0.005)
    until(lambda: receiver.reads.num_free == READ_FOR_LONG.max_transfers)
    assert [receiver.pages.host_bytes(page) for page in hosts[WINDOW:]] == before[WINDOW:]


def test_a_replica_without_nixl_sends_the_pages_that_were_to_be_read(ends: Callable[..., Ends]) -> None:
    both = ends(ScriptedLender(20))
    reader = Receiver(READ_FOR_LONG)
    reader.fetcher.load(both.source, SPACE, list(range(20 * PAGE_SIZE)), 0, list(range(20)))
    assert reader.has_ended.wait(60)
    assert reader.fetcher.finished().loaded == list(range(20))
    assert reader.pages.host_bytes(19) == bytes(both.there.device(19))
    reader.fetcher.close()


def test_pages_are_sent_where_all_memory_for_reads_is_taken(ends: Callable[..., Ends]) -> None:
    lender = ScriptedLender(3)
    lender.waits = []
    first = ends(lender, READ_FOR_LONG.model_copy(update={"max_transfers": 1}))
    second = ends(ScriptedLender(3))
    first.fetch(0, [0, 1, 2])
    until(lambda: bool(lender.waits))
    first.source = second.source
    first.fetch(0, [3, 4, 5])
    first.wait(3)
    assert first.loaded == [3, 4, 5]
    lender.lent.add(1)
    lender.make(lender.waits[0])
    first.wait(6)
    assert first.loaded == [3, 4, 5, 0, 1, 2]


def test_a_sender_confirms_only_the_pages_that_it_has_lent(ends: Callable[..., Ends]) -> None:
    both = ends(ScriptedLender(6), READ_FOR_LONG)
    context: Context = zmq.Context()
    socket = connect_peer(context, both.sender.address, 2**20)
    for number, check in enumerate((Check(0, 0, 7), Check(1, 1, 5), Check(2, 0, 6))):
        tokens = bytes(4 * 6 * PAGE_SIZE)
        version, identity = messages.VERSION, both.here.identity
        fetch = FetchPages(version, number, identity, "demo", "", tokens, 0, WINDOW, reads=True)
        socket.send(messages.encode(fetch))
        assert isinstance(messages.decode_to_fetcher(socket.recv()), Readable)
        socket.send(messages.encode(check))
        answer = messages.decode_to_fetcher(socket.recv())
        if number < 2:
            assert answer == End(number, "other pages were read than are lent")
        else:
            assert isinstance(answer, Held) and len(answer.checksums) == 6
            assert messages.decode_to_fetcher(socket.recv()) == End(2)
    until(lambda: not both.sender.num_transfers)
    assert both.sender.counts == {"malformed": 2, "sent": 1, "pages": 6} and not both.lender.lent
    context.destroy(linger=0)


def test_a_loan_ends_when_its_reader_confirms_nothing(ends: Callable[..., Ends]) -> None:
    both = ends(ScriptedLender(6), READ_AT_ONCE)
    context: Context = zmq.Context()
    socket = connect_peer(context, both.sender.address, 2**20)
    identity = both.here.identity
    fetch = FetchPages(messages.VERSION, 1, identity, "demo", "", bytes(4 * 24), 0, WINDOW, reads=True)
    socket.send(messages.encode(fetch))
    assert isinstance(messages.decode_to_fetcher(socket.recv()), Readable)
    assert isinstance(messages.decode_to_fetcher(socket.recv()), End)
    assert both.lender.all_back.wait(60)
    socket.send(messages.encode(Check(1, 0, 6)))
    socket.send(b"")
    until(lambda: both.sender.counts["malformed"] == 1)
    assert not socket.poll(0)  # the late check was not confirmed
    context.destroy(linger=0)


def test_a_missing_nixl_is_an_error_that_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nixl", "nixl._api", "nixl_cu12", "nixl_cu12._api", "nixl_cu13", "nixl_cu13._api"):
        monkeypatch.setitem(sys.modules, module, None)
    check_transport(None)
    check_transport(FOR_LONG)
    with pytest.raises(RuntimeError, match=r"engines.kv_fetch.transport is nixl.*pip install 'raydix\[nixl\]'"):
        check_transport(READ_FOR_LONG)
    with pytest.raises(RuntimeError, match="leave the transport at zmq"):
        NixlAgent(Pages(1).regions())
