"""The replica's end of the wire, tested with well-behaved, broken and unauthenticated ingresses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from cache.news.prefix_log import PrefixLog
from deployments.config.settings import WireSettings
from deployments.wire import messages
from deployments.wire.server import WireServer, WireTimings
from engine.values.stream_delta import StreamDelta, Timings
from tests.deployments.support.wire_peer import BarePeer, Peer, Requests, ask, hello, served, wait_until


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
def aborted(requests: Requests) -> list[str]:
    return requests.aborted


@pytest.fixture
def prefixes() -> PrefixLog:
    return PrefixLog()


@pytest.fixture
def server(requests: Requests, prefixes: PrefixLog) -> Iterator[WireServer]:
    timings = WireTimings(0.02, keep_ended_s=2.0, absent_ingress_s=2.0, cache_period_s=0.01)
    made = served(requests, timings, prefixes, 16, "model")
    yield made
    made.close()


def test_an_ingress_that_reconnects_is_welcomed_while_its_old_connection_seems_open(
    server: WireServer,
) -> None:
    """ZeroMQ gives up the connection to a suspended replica, which notices nothing."""
    with zmq.Context() as context:
        old = BarePeer(context, server, b"the ingress")
        old.send(hello())
        old.receive(messages.Welcome)
        new = BarePeer(context, server, b"the ingress")
        new.send(hello())
        new.receive(messages.Welcome)
        server.open(ask("a"), "i")
        server.publish([StreamDelta("a", [1])])
        assert new.receive(messages.Tokens).deltas[0].request_id == "a"
        for peer in (old, new):
            peer.socket.close()


def test_a_version_before_the_last_release_is_refused_with_both_named(server: WireServer, peer: Peer) -> None:
    old = peer()
    old.send(messages.Hello(0, 1, "i", "", {}))
    assert old.receive(messages.Refused).reason.count("version") == 2


def test_the_ingress_of_a_newer_release_is_welcome_and_told_this_version(server: WireServer, peer: Peer) -> None:
    newer = peer()
    hello = msgspec.to_builtins(messages.Hello(messages.WIRE_VERSION + 1, 1, "i", "", {}))
    newer.socket.send(msgspec.msgpack.encode([*hello, "a field that this version does not know"]))
    assert newer.receive(messages.Welcome).version == messages.WIRE_VERSION


def test_garbage_and_messages_before_a_hello_are_dropped_and_counted(
    server: WireServer, peer: Peer, aborted: list[str]
) -> None:
    stranger = peer()
    server.open(ask("a"), "i")
    for message in (b"", b"\xff" * 100, b"\x93\x01", messages.Abort("a"), messages.Resume({"a": 0})):
        stranger.send(message)
    stranger.socket.send_multipart([b"three", b"frames"])
    wait_until(lambda: sum(server.counts.values()) == 6)
    assert server.counts == {"malformed": 4, "unauthenticated": 2}
    assert aborted == []
    friend = peer()
    friend.send(hello())
    assert friend.receive(messages.Welcome).replica == "r0"


def test_heartbeats_arrive_while_an_ingress_is_connected(server: WireServer, peer: Peer) -> None:
    ingress = peer()
    ingress.send(hello())
    first = ingress.receive(messages.Welcome)
    for number in range(5):
        assert ingress.receive(messages.Heartbeat).seq == first.seq + 1 + number
    ingress.socket.close()
    wait_until(lambda: not server.is_connected("i"))


def test_a_replica_sends_few_heartbeats_without_requests_and_many_again_with_one(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    server = served(Requests(), WireTimings(0.02, idle_heartbeat_s=3600.0))
    ingress = BarePeer(context, server)
    ingress.send(hello())
    ingress.receive(messages.Welcome)
    # What is heard before the first request came with the hello or the server's start.
    with pytest.raises(TimeoutError):
        for _ in range(4):
            ingress.receive(messages.Heartbeat, timeout=0.5)
    ingress.send(ask("a"))
    assert ingress.receive(messages.Tokens).deltas[0].request_id == "a"
    for _ in range(4):
        ingress.receive(messages.Heartbeat)
    server.close()


def test_tokens_produced_before_the_hello_wait_for_it(server: WireServer, peer: Peer) -> None:
    server.open(ask("a"), "i")
    server.publish([StreamDelta("a", [1, 2])])
    server.publish([StreamDelta("a", [3], finish_reason="length")])
    ingress = peer()
    ingress.send(hello())
    (output,) = ingress.receive(messages.Tokens).deltas
    assert (output.start, output.token_ids, output.finish_reason) == (0, [1, 2, 3], "length")


def test_a_reconnecting_ingress_gets_the_tokens_that_it_missed(server: WireServer, peer: Peer) -> None:
    ingress = peer()
    ingress.send(hello())
    ingress.receive(messages.Welcome)
    server.open(ask("a"), "i")
    server.accept("a")
    assert ingress.receive(messages.Tokens).deltas[0].token_ids == []
    server.publish([StreamDelta("a", [1, 2, 3])])
    ingress.socket.close()
    again = peer()
    again.send(hello(a=1))
    (output,) = again.receive(messages.Tokens).deltas
    assert (output.start, output.token_ids) == (1, [2, 3])


def test_timings_travel_with_the_tokens_they_were_told_at(server: WireServer, peer: Peer) -> None:
    ingress = peer()
    ingress.send(hello())
    ingress.receive(messages.Welcome)
    first, last = Timings(0.1, 0.2, 0.0), Timings(0.1, 0.2, 0.3, 1, 5)
    server.open(ask("a"), "i")
    for token, timings in ((1, first), (2, None)):
        server.publish([StreamDelta("a", [token], timings=timings)])
        (output,) = ingress.receive(messages.Tokens).deltas
        assert (output.token_ids, output.timings) == ([token], timings)
    ingress.send(messages.Resume({"a": 0}))
    (again,) = ingress.receive(messages.Tokens).deltas
    assert (again.token_ids, again.timings) == ([1, 2], first)
    server.publish([StreamDelta("a", [3], finish_reason="stop", timings=last)])
    (end,) = ingress.receive(messages.Tokens).deltas
    assert (end.token_ids, end.timings) == ([3], last)


def test_a_step_is_one_message_per_ingress(server: WireServer, peer: Peer) -> None:
    one, two = peer(), peer()
    one.send(hello("one"))
    two.send(hello("two"))
    one.receive(messages.Welcome), two.receive(messages.Welcome)
    for number in range(6):
        server.open(ask(f"s{number}"), "one" if number < 4 else "two")
    server.publish([StreamDelta(f"s{number}", [number]) for number in range(6)])
    assert [output.token_ids for output in one.receive(messages.Tokens).deltas] == [[0], [1], [2], [3]]
    assert [output.token_ids for output in two.receive(messages.Tokens).deltas] == [[4], [5]]


def test_an_ingress_ends_only_its_own_requests(server: WireServer, peer: Peer, aborted: list[str]) -> None:
    one = peer()
    one.send(hello("one"))
    one.receive(messages.Welcome)
    server.open(ask("mine"), "one")
    server.open(ask("theirs"), "two")
    one.send(messages.Abort("theirs"))
    one.send(messages.Abort("mine"))
    wait_until(lambda: "mine" in aborted)
    assert "theirs" not in aborted


def test_requests_of_an_ingress_that_never_comes_back_are_aborted(server: WireServer, aborted: list[str]) -> None:
    server.open(ask("a"), "gone")
    wait_until(lambda: "a" in aborted)


def test_a_stream_that_was_forgotten_is_reported_lost(server: WireServer, peer: Peer) -> None:
    ingress = peer()
    ingress.send(hello())
    ingress.receive(messages.Welcome)
    ingress.send(messages.Resume({"ghost": 7}))
    assert ingress.receive(messages.Unknown).request_ids == ["ghost"]


def test_another_model_is_refused(server: WireServer, peer: Peer) -> None:
    stranger = peer()
    stranger.send(messages.Hello(messages.WIRE_VERSION, 1, "i", "another", {}))
    assert "model" in stranger.receive(messages.Refused).reason


def test_a_replayed_hello_is_dropped(server: WireServer, peer: Peer) -> None:
    friend, thief = peer(), peer()
    recorded = hello()
    friend.send(recorded)
    friend.receive(messages.Welcome)
    thief.send(recorded)
    wait_until(lambda: server.counts["replayed"] == 1)
    friend.receive(messages.Heartbeat)
    with pytest.raises(TimeoutError):
        thief.receive(messages.Heartbeat, timeout=0.1)


def test_a_newcomer_gets_a_snapshot_and_then_every_change(
    server: WireServer, peer: Peer, prefixes: PrefixLog
) -> None:
    prefixes.store([1, 2, 3])
    ingress = peer()
    ingress.send(hello())
    assert ingress.receive(messages.Welcome).block_tokens == 16
    wait_until(lambda: any(prefixes.snapshot()))
    snapshot = ingress.ask_for_part(messages.Resync())
    assert (list(messages.unpack_hashes(snapshot.hashes)), snapshot.is_last) == ([1, 2, 3], True)
    prefixes.store([2**64 - 1])
    prefixes.evict([2])
    delta = ingress.receive(messages.PrefixDelta)
    assert list(messages.unpack_hashes(delta.stored)) == [2**64 - 1]
    assert list(messages.unpack_hashes(delta.evicted)) == [2]


def test_a_large_snapshot_comes_in_parts(server: WireServer, peer: Peer, prefixes: PrefixLog) -> None:
    prefixes.store(range(300_000))
    ingress = peer()
    ingress.send(hello())
    wait_until(lambda: any(prefixes.snapshot()))
    parts = [ingress.ask_for_part(messages.Resync())]
    while not parts[-1].is_last:
        parts.append(ingress.ask_for_part(messages.NextPart()))
    assert len(parts) > 10 and [part.is_first for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [hash_ for part in parts for hash_ in messages.unpack_hashes(part.hashes)] == list(range(300_000))


def test_an_ingress_that_asks_gets_another_snapshot(server: WireServer, peer: Peer, prefixes: PrefixLog) -> None:
    ingress = peer()
    ingress.send(hello())
    assert ingress.ask_for_part(messages.Resync()).hashes == b""
    prefixes.store([7])
    ingress.receive(messages.PrefixDelta)
    assert list(messages.unpack_hashes(ingress.ask_for_part(messages.Resync()).hashes)) == [7]


def test_a_request_is_accepted_with_an_empty_delta_and_counted_for_all_ingresses(
    server: WireServer, peer: Peer, requests: Requests
) -> None:
    one, two = peer(), peer()
    one.send(hello("one"))
    two.send(hello("two"))
    one.receive(messages.Welcome), two.receive(messages.Welcome)
    one.send(ask("a", number=7, tenant="t"))
    (accepted,) = one.receive(messages.Tokens).deltas
    assert accepted == StreamDelta("a")
    assert [(asked.tenant, messages.unpack_tokens(asked.prompt_ids).tolist()) for asked in requests.asked] == [
        ("t", [1, 2, 3])
    ]

    def load_at(ingress: BarePeer, condition: Callable[[messages.Load], bool]) -> messages.Load:
        deadline = time.monotonic() + 60
        while True:
            load: messages.Load = ingress.receive(messages.Heartbeat).load
            if condition(load):
                return load
            assert time.monotonic() < deadline, load

    seen = load_at(two, lambda load: load.num_requests == 1)
    assert (seen.num_own, seen.dispatches_seen) == (0, 0)
    assert load_at(one, lambda load: load.dispatches_seen == 7).num_own == 1


def test_a_refusal_gives_the_reason_and_leaves_nothing(server: WireServer, peer: Peer, requests: Requests) -> None:
    ingress = peer()
    ingress.send(hello())
    requests.accepts = False
    ingress.send(ask("a"))
    refused = ingress.receive(messages.NotRun)
    assert (refused.request_id, refused.kind, refused.retry_after_s) == ("a", "queue_full", 2.5)
    assert server.num_live == 0


def test_a_request_that_comes_again_is_not_run_again(server: WireServer, peer: Peer, requests: Requests) -> None:
    ingress = peer()
    ingress.send(hello())
    for _ in range(2):
        ingress.send(ask("a"))
        assert ingress.receive(messages.Tokens).deltas == [StreamDelta("a")]
    server.publish([StreamDelta("a", [5], finish_reason="length")])
    ingress.receive(messages.Tokens)
    ingress.send(ask("a"))
    (output,) = ingress.receive(messages.Tokens).deltas
    assert (output.start, output.token_ids, output.finish_reason) == (0, [5], "length")
    assert len(requests.asked) == 1


def test_the_id_of_another_ingress_s_request_is_refused(
    server: WireServer, peer: Peer, requests: Requests
) -> None:
    one, two = peer(), peer()
    one.send(hello("one"))
    two.send(hello("two"))
    one.send(ask("a"))
    one.receive(messages.Tokens)
    two.send(ask("a"))
    assert "in use" in two.receive(messages.NotRun).reason
    assert (len(requests.asked), server.num_live) == (1, 1)


def test_a_request_that_the_replica_cannot_take_fails_immediately(
    server: WireServer, peer: Peer, requests: Requests
) -> None:
    requests.server = None  # raises
    ingress = peer()
    ingress.send(hello())
    ingress.send(ask("a"))
    assert ingress.receive(messages.NotRun).kind == "failed"
    wait_until(lambda: server.counts["failed"] == 1)


def test_when_the_engine_fails_every_ingress_learns_which_requests_do_not_continue(
    server: WireServer, peer: Peer
) -> None:
    one, two = peer(), peer()
    one.send(hello("one"))
    two.send(hello("two"))
    for ingress, name in ((one, "a"), (two, "b")):
        ingress.send(ask(name))
        ingress.receive(messages.Tokens)
    server.fail_all("the device is gone")
    for ingress, name in ((one, "a"), (two, "b")):
        failed = ingress.receive(messages.NotRun)
        assert (failed.request_id, failed.kind, failed.reason) == (name, "engine_ended", "the device is gone")
    assert server.num_live == 0


def test_a_request_may_be_withdrawn_before_it_is_answered(
    server: WireServer, peer: Peer, requests: Requests
) -> None:
    ingress = peer()
    ingress.send(hello())
    ingress.send(messages.Abort("a"))
    wait_until(lambda: requests.withdrawn == [("i", "a")])
    assert requests.aborted == []


def test_replicas_of_a_node_take_free_ports_of_the_range() -> None:
    """Sockets stay within the range that a firewall may allow; the error of a full range says what to do."""
    first = served(Requests(), WireTimings())
    taken = int(first.endpoint.rsplit(":", 1)[1])
    first.close()
    ports = (taken, taken + 20)
    bound = [served(Requests(), WireTimings(), ports=ports) for _ in range(3)]
    found = [int(server.endpoint.rsplit(":", 1)[1]) for server in bound]
    # Not always in order: other processes on this machine take and release ports meanwhile.
    assert len(set(found)) == 3 and ports[0] <= min(found) and max(found) <= ports[1]
    with pytest.raises(OSError, match=r"widen wire\.ports"):
        served(Requests(), WireTimings(), ports=(found[0], found[0]))
    for server in bound:
        server.close()


def test_an_address_that_is_not_ours_is_no_full_range() -> None:
    with pytest.raises(zmq.ZMQError):
        WireServer("203.0.113.1", "r0", messages.Load, Requests(), settings=WireSettings(ports=(20000, 20010)))
