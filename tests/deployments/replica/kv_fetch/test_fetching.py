"""KV that goes from one replica to another over real sockets: whole, in part, and not at all."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing

import pytest
import zmq

from deployments.config.kv_fetch import KvFetchSettings
from deployments.config.settings import WireSettings
from deployments.replica.kv_fetch import messages
from deployments.replica.kv_fetch.fetcher import KVFetcher
from deployments.wire.handshake import Context
from deployments.wire.sockets import connect_peer
from engine.host_tier.lower_tier import Finished
from engine.values.request import KVSource
from router.addresses import KVAddress
from tests.deployments.support import raw_peer
from tests.deployments.support.kv_ends import (
    AT_ONCE,
    FOR_LONG,
    READ_FOR_LONG,
    SPACE,
    Ends,
    Liar,
    SteppedClock,
    until,
)
from tests.deployments.support.lent_pages import PAGE_BYTES, PAGE_SIZE, Pages, ScriptedLender

HALF_A_SECOND = FOR_LONG.model_copy(update={"silence_s": 0.5})
LONGER_THAN_A_PAUSE = FOR_LONG.model_copy(update={"silence_s": 1.0})
"""A pause counts as half a second, twice."""
by_each_transport = pytest.mark.parametrize("settings", [FOR_LONG, READ_FOR_LONG], ids=["zmq", "nixl"])


@pytest.mark.parametrize(
    ("settings", "is_encrypted"),
    [(FOR_LONG, True), (FOR_LONG, False), (READ_FOR_LONG, True)],
    ids=["encrypted", "plain", "nixl"],
)
def test_pages_of_device_and_host_arrive_as_they_were_lent(
    ends: Callable[..., Ends], settings: KvFetchSettings, is_encrypted: bool
) -> None:
    both = ends(ScriptedLender(20, 20), settings, wire=WireSettings(encrypt=is_encrypted))
    before = both.here.host_bytes(200)
    hosts = list(range(50, 88))
    both.fetch(2, hosts)
    both.wait(38)

    assert (both.loaded, both.failed) == (hosts, [])
    wanted = [bytes(both.there.device(page)) for page in range(2, 20)]
    wanted += [both.there.host_bytes(page) for page in range(100, 120)]
    assert [both.here.host_bytes(page) for page in hosts] == wanted
    assert both.here.host_bytes(200) == before
    assert both.lender.asked == [(SPACE, list(range(40 * PAGE_SIZE)), 2)]
    assert both.lender.all_back.wait(60)
    assert both.fetcher.totals()[:4] == (38, 0, 1, 0)
    assert both.fetcher.seconds(both.source, 10) > 0 and both.fetcher.tokens_per_s > 0
    until(lambda: not both.sender.num_transfers)
    assert both.sender.counts == {"pages": 38, "sent": 1}


@by_each_transport
def test_pages_that_the_other_replica_lacks_fail_and_the_rest_comes(
    ends: Callable[..., Ends], settings: KvFetchSettings
) -> None:
    both = ends(ScriptedLender(5), settings)
    both.fetch(0, list(range(10, 20)))
    both.wait(10)
    assert (both.loaded, both.failed) == ([10, 11, 12, 13, 14], [15, 16, 17, 18, 19])
    both.fetch(5, [30, 31])
    both.wait(12)
    assert (both.loaded, both.failed) == ([10, 11, 12, 13, 14], [15, 16, 17, 18, 19, 30, 31])
    assert both.lender.all_back.wait(60)


@by_each_transport
def test_concurrent_fetches_share_the_connection(ends: Callable[..., Ends], settings: KvFetchSettings) -> None:
    both = ends(ScriptedLender(30), settings)
    for number in range(8):
        both.fetch(0, list(range(30 * number, 30 * number + 30)))
    both.wait(240)
    assert not both.failed
    for number in range(8):
        assert both.here.host_bytes(30 * number + 7) == bytes(both.there.device(7))


def test_a_replica_runs_max_transfers_fetches_together_and_the_others_wait(ends: Callable[..., Ends]) -> None:
    lender = ScriptedLender(3)
    lender.waits = []
    both = ends(lender, FOR_LONG.model_copy(update={"max_transfers": 2}))
    for number in range(3):
        both.fetch(0, [3 * number, 3 * number + 1, 3 * number + 2])
    until(lambda: len(lender.asked) == 2)
    assert both.sender.num_transfers == 2
    lender.make(lender.waits[0])
    until(lambda: len(lender.asked) == 3)
    for future in lender.waits[1:]:
        lender.make(future)
    both.wait(9)
    assert sorted(both.loaded) == list(range(9)) and not both.sender.counts["declined"]


def test_more_transfers_of_all_than_allowed_are_declined(ends: Callable[..., Ends]) -> None:
    lender = ScriptedLender(3)
    lender.waits = []
    both = ends(lender, FOR_LONG.model_copy(update={"max_transfers": 1}))
    other = KVFetcher(both.here, PAGE_SIZE, FOR_LONG)
    both.fetch(0, [0, 1, 2])
    until(lambda: bool(lender.waits))
    has_ended = threading.Event()
    other.on_finished(has_ended.set)
    other.load(both.source, SPACE, list(range(8)), 0, [3, 4])
    assert has_ended.wait(60)
    assert other.finished().failed == [3, 4] and both.sender.counts["declined"] == 1
    lender.make(lender.waits[0])
    both.wait(3)
    assert both.loaded == [0, 1, 2]
    other.close()


def test_pages_of_another_kind_are_not_lent(ends: Callable[..., Ends]) -> None:
    both = ends(ScriptedLender(9))
    both.there.identity = "model y"
    both.fetch(0, [1, 2])
    both.wait(2)
    assert both.failed == [1, 2] and not both.lender.asked


def test_an_engine_that_stops_lends_nothing(ends: Callable[..., Ends]) -> None:
    lender = ScriptedLender(9)
    both = ends(lender)
    lender.is_stopped = True
    both.fetch(0, [1])
    both.wait(1)
    lender.is_stopped, lender.waits = False, []
    both.fetch(0, [2])
    until(lambda: bool(lender.waits))
    lender.waits[0].cancel()
    lender.waits[0].set_running_or_notify_cancel()
    both.wait(2)
    assert both.failed == [1, 2]
    until(lambda: not both.sender.num_transfers)


def test_a_silent_replica_is_given_up_and_asked_no_more_for_a_while() -> None:
    here, liar = Pages(2), Liar([])
    fetcher = KVFetcher(here, PAGE_SIZE, AT_ONCE)
    has_ended = threading.Event()
    fetcher.on_finished(has_ended.set)
    fetcher.load(liar.source, SPACE, list(range(8)), 0, [1, 2])
    assert has_ended.wait(60)
    assert fetcher.finished().failed == [1, 2] and not here.reads
    assert fetcher.seconds(liar.source, 1) == math.inf
    assert fetcher.seconds(KVSource(KVAddress("tcp://127.0.0.1:9", "s" * 40), 8), 1) == 0
    fetcher.close()
    liar.close()


def test_a_replica_that_cannot_be_asked_keeps_no_page(ends: Callable[..., Ends]) -> None:
    both = ends(ScriptedLender(9))
    lends, both.source = both.source, KVSource(KVAddress("no address", "no key", "none"), 8)
    both.fetch(0, [1, 2])
    both.wait(2)
    assert both.failed == [1, 2]
    both.source = lends
    both.fetch(0, [3])
    both.wait(3)
    assert both.loaded == [3]


def test_a_replica_whose_step_takes_long_is_waited_for() -> None:
    clock = SteppedClock()
    with closing(Liar([])) as liar, closing(KVFetcher(Pages(2), PAGE_SIZE, HALF_A_SECOND, clock=clock)) as fetcher:
        fetcher.load(liar.source, SPACE, list(range(8)), 0, [1, 2])
        peer = liar.asked()
        (connection,) = fetcher._connections.values()
        transfer = connection.transfers[1]
        for _ in range(3):
            clock.pass_awake(0.4)
            heard_at = transfer.heard_at
            liar.say(peer, messages.encode(messages.Busy(1)))
            until(lambda: transfer.heard_at > heard_at)  # noqa: B023
        assert not fetcher.finished().failed
        clock.pass_awake(0.8)
        assert fetcher.finished().failed == [1, 2]


def test_a_replica_is_not_silent_because_this_process_stood_still() -> None:
    """What it sent meanwhile is read, also when the rest of its time would be over by the awake clock."""
    clock, settings = SteppedClock(), LONGER_THAN_A_PAUSE
    with closing(Liar([])) as liar, closing(KVFetcher(Pages(2), PAGE_SIZE, settings, clock=clock)) as fetcher:
        fetcher.load(liar.source, SPACE, list(range(8)), 0, [1, 2])
        peer = liar.asked()
        clock.step(3600.0)
        clock.pass_awake(0.1)
        data = bytes(PAGE_BYTES)

        def send() -> None:
            for position in range(2):
                liar.say(peer, page(position, zlib.crc32(data)), data)

        clock.step(3600.0, send)
        until(lambda: fetcher.totals().loaded == 2)
        assert fetcher.finished() == Finished((), [1, 2], [])


def test_a_fetcher_keeps_its_loan_when_the_lender_stood_still(ends: Callable[..., Ends]) -> None:
    clock, lender = SteppedClock(), ScriptedLender(200)
    both = ends(lender, LONGER_THAN_A_PAUSE, clock=clock)
    context: Context = zmq.Context()
    socket = connect_peer(context, both.sender.address, PAGE_BYTES + 100)
    fetch = messages.FetchPages(messages.VERSION, 1, both.here.identity, "demo", "", bytes(4 * 801), 0, 2)
    socket.send(messages.encode(fetch))

    def told(count: int) -> list[str]:
        answers = [messages.decode_to_fetcher(socket.recv_multipart()[0]) for _ in range(count)]
        return [type(answer).__name__ for answer in answers]

    assert told(3) == ["Lent", "Page", "Page"]
    clock.step(3600.0)
    clock.pass_awake(0.1)
    clock.step(3600.0, lambda: socket.send(messages.encode(messages.More(1, 1))))
    assert told(1) == ["Page"]
    assert both.sender.num_transfers == 1
    clock.pass_awake(2.0)
    assert told(1) == ["End"]
    assert lender.all_back.wait(60)
    context.destroy(linger=0)


def test_a_loan_that_is_made_when_its_fetcher_is_gone_is_given_back(ends: Callable[..., Ends]) -> None:
    lender = ScriptedLender(9)
    lender.waits = []
    both = ends(lender, AT_ONCE)
    both.fetch(0, [1, 2])
    until(lambda: bool(lender.waits))
    both.fetcher.close()
    until(lambda: not both.sender.num_transfers)
    lender.make(lender.waits[0])
    assert lender.all_back.wait(60)
    assert not both.here.reads


def test_fetches_from_a_replica_that_is_gone_fail(ends: Callable[..., Ends]) -> None:
    lender = ScriptedLender(9)
    lender.waits = []
    both = ends(lender, AT_ONCE)
    both.fetch(0, [1, 2])
    until(lambda: bool(lender.waits))
    both.sender.close()
    both.wait(2)
    assert both.failed == [1, 2]


def test_a_loan_ends_when_its_fetcher_grants_nothing_more(ends: Callable[..., Ends]) -> None:
    lender = ScriptedLender(200)
    both = ends(lender, AT_ONCE)
    context: Context = zmq.Context()
    socket = connect_peer(context, both.sender.address, PAGE_BYTES + 100)
    tokens = messages.FetchPages(messages.VERSION, 1, both.here.identity, "demo", "", bytes(4 * 801), 0, 3)
    socket.send(messages.encode(tokens))
    answers = [messages.decode_to_fetcher(socket.recv_multipart()[0]) for _ in range(5)]
    assert [type(answer).__name__ for answer in answers] == ["Lent", "Page", "Page", "Page", "End"]
    assert lender.all_back.wait(60) and not both.sender.num_transfers
    context.destroy(linger=0)


def test_an_invalid_message_changes_nothing(ends: Callable[..., Ends]) -> None:
    both = ends(ScriptedLender(4))
    context: Context = zmq.Context()
    socket = connect_peer(context, both.sender.address, PAGE_BYTES + 100)
    version, identity = messages.VERSION, both.here.identity
    fetch = messages.FetchPages(version, 1, identity, "demo", "", b"abc", 0, 3)  # no whole token ids
    for parts in (
        [b""],
        [b"\xc1"],
        [messages.encode(messages.More(7, 1))],
        [messages.encode(fetch)],
    ):
        socket.send_multipart(parts)
    end = messages.decode_to_fetcher(socket.recv())
    assert isinstance(end, messages.End) and end.number == 1
    assert both.sender.counts == {"malformed": 2, "declined": 1}
    both.fetch(0, [5])
    both.wait(1)
    assert both.loaded == [5]
    context.destroy(linger=0)


def test_a_message_of_many_parts_ends_its_connection(ends: Callable[..., Ends]) -> None:
    both = ends(ScriptedLender(4))
    context: Context = zmq.Context()
    socket = connect_peer(context, both.sender.address, PAGE_BYTES + 100)
    events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    socket.send_multipart([b""] * 10_000)
    assert events.poll(60_000)
    both.fetch(0, [5])
    both.wait(1)
    assert both.loaded == [5] and both.sender.counts["malformed"] == 1
    context.destroy(linger=0)


def test_a_message_that_never_ends_ends_its_connection(
    ends: Callable[..., Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replica.kv_fetch.sender.MAX_FETCH_BYTES", 2**20)
    both = ends(ScriptedLender(4), FOR_LONG, WireSettings(encrypt=False))
    part = raw_peer.frame(raw_peer.MORE, bytes(65536))
    with raw_peer.admitted(both.sender.address) as endless, pytest.raises(ConnectionError):
        while True:
            endless.sendall(part)
    both.fetch(0, [5])
    both.wait(1)
    assert both.loaded == [5] and both.sender.counts["endless"] == 1


def test_a_peer_without_the_key_gets_no_answer(ends: Callable[..., Ends]) -> None:
    both = ends(ScriptedLender(4), AT_ONCE)
    address = both.sender.address
    _, secret = zmq.curve_keypair()
    both.source = KVSource(KVAddress(address.endpoint, secret.decode(), address.public_key), 100)
    both.fetch(0, [1])
    both.wait(1)
    assert both.failed == [1] and not both.lender.asked
    assert secret.decode() not in repr(both.source)


def page(position: int, checksum: int = 0, number: int = 1) -> bytes:
    return messages.encode(messages.Page(number, position, checksum))


@pytest.mark.parametrize(
    "answer",
    [
        [page(0, 1), bytes(PAGE_BYTES)],
        [page(1, 0), b""],
        [page(0, 0)],
        [page(0, 0), b""],
    ],
    ids=["checksum", "position", "no page", "size"],
)
def test_a_wrong_page_ends_the_transfer(answer: list[bytes]) -> None:
    here = Pages(2)
    fetcher = KVFetcher(here, PAGE_SIZE, FOR_LONG)
    has_ended = threading.Event()
    fetcher.on_finished(has_ended.set)
    before = here.host_bytes(3)
    liar = Liar([[b"\xc1"], [page(0, number=9)], answer])
    fetcher.load(liar.source, SPACE, list(range(8)), 0, [3, 4])
    assert isinstance(messages.decode_to_sender(liar.answer()[0]), messages.Stop)
    assert has_ended.wait(60)
    assert fetcher.finished() == Finished((), [], [3, 4])
    assert here.host_bytes(3) == before
    assert fetcher.totals() == (0, 2, 1, 1)
    fetcher.close()
    liar.close()


def test_a_page_that_comes_twice_ends_the_transfer_and_the_first_one_counts() -> None:
    here, data = Pages(2), bytes(range(PAGE_BYTES))
    fetcher = KVFetcher(here, PAGE_SIZE, FOR_LONG)
    has_ended = threading.Event()
    fetcher.on_finished(has_ended.set)
    liar = Liar([[page(0, zlib.crc32(data)), data]] * 2)
    fetcher.load(liar.source, SPACE, list(range(8)), 0, [3, 4])
    assert isinstance(messages.decode_to_sender(liar.answer()[0]), messages.Stop)
    assert has_ended.wait(60)
    assert fetcher.finished() == Finished((), [3], [4])
    assert here.host_bytes(3) == data
    fetcher.close()
    liar.close()


def test_a_page_that_comes_after_its_transfer_was_given_up_changes_nothing() -> None:
    here, data = Pages(2), bytes(range(PAGE_BYTES))
    fetcher, liar = KVFetcher(here, PAGE_SIZE, AT_ONCE), Liar([])
    has_ended = threading.Event()
    fetcher.on_finished(has_ended.set)
    before = here.host_bytes(3)
    fetcher.load(liar.source, SPACE, list(range(8)), 0, [3])
    peer = liar.asked()
    assert has_ended.wait(60)
    assert fetcher.finished() == Finished((), [], [3])
    liar.say(peer, page(0, zlib.crc32(data)), data)
    has_ended.clear()
    lender = Liar([[page(0, zlib.crc32(data), number=2), data]])
    fetcher.load(lender.source, SPACE, list(range(4)), 0, [4])
    peer = lender.asked()
    lender.say(peer, page(0, zlib.crc32(data), number=2), data)
    assert has_ended.wait(60)
    assert fetcher.finished() == Finished((), [4], [])
    assert here.host_bytes(3) == before
    fetcher.close()
    liar.close()
    lender.close()


def test_both_ends_close_in_the_midst_of_a_transfer(ends: Callable[..., Ends]) -> None:
    lender = ScriptedLender(9)
    lender.waits = []
    both = ends(lender)
    both.fetch(0, [1, 2])
    until(lambda: bool(lender.waits))
    both.fetcher.close()
    both.fetcher.close()
    both.sender.close()
    both.sender.close()
    late: Future[object] = lender.waits[0]  # type: ignore[assignment]
    late.cancel()
    assert late.set_running_or_notify_cancel() is False
