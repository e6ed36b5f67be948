"""Malformed and hostile messages are dropped and counted on both ends, and do not affect other peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.wire import messages
from deployments.wire.connection import WireConnection
from deployments.wire.server import WireServer, WireTimings
from deployments.wire.sockets import MAX_REQUEST_BYTES
from engine.values.stream_delta import StreamDelta
from tests.deployments.support.silent_listener import Silence
from tests.deployments.support.wire_peer import BarePeer, Requests, ask, hello, impostor, served, wait_until
from tests.support.examples import examples

NESTED = b"\x92\x03" + b"\x91" * 200_000 + b"\xc0"
"""A well-formed Resync with a surplus field, which is a deeply nested array."""
MALFORMED = {
    "empty": b"",
    "no message": b"\xff" * 100,
    "truncated array": b"\x93\x01",
    "truncated hello": messages.encode(messages.Hello(messages.WIRE_VERSION, 1, "i", "", {"a": 1}))[:-2],
    "array of four billion": b"\xdd\xff\xff\xff\xff",
    "map of four billion": b"\x92\x02\xdf\xff\xff\xff\xff",
    "string of four gigabytes": b"\x92\x01\xdb\xff\xff\xff\xff",
    "nested deeply": NESTED,
    "unknown tag": messages.encode([99, "a"]),
    "of the other direction": messages.encode(messages.Refused("no")),
    "number for a text": messages.encode([1, 5]),
    "text for a number": messages.encode([2, {"a": "b"}]),
    "less than no tokens": messages.encode(messages.Hello(messages.WIRE_VERSION, 1, "i", "", {"a": -1})),
    "more tokens than there are": messages.encode(messages.Resume({"a": 2**64 - 1})),
    "sampling that is not allowed": messages.encode([4, 1, "a", b"", {"temperature": -1}]),
    "no text": b"\x92\x01\xa2\xff\xfe",
}
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=12,
)
shapeless = st.binary(max_size=100) | st.lists(values, max_size=7).map(msgspec.msgpack.encode)
"""Arbitrary bytes, and arbitrary msgpack."""
tagged = st.tuples(st.integers(0, 17), st.lists(values, max_size=6)).map(
    lambda parts: msgspec.msgpack.encode([parts[0], *parts[1]])
)
"""Arrays that begin with a message's tag."""


# --- the replica's end --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    made = served(Requests(), WireTimings(0.02, cache_period_s=0.01))
    yield made
    made.close()


@pytest.fixture
def friend(server: WireServer, context: zmq.Context[zmq.Socket[bytes]]) -> BarePeer:
    """A well-behaved ingress."""
    made = BarePeer(context, server)
    made.send(hello("friend"))
    made.receive(messages.Welcome)
    return made


def catch_up(friend: BarePeer) -> None:
    """Read all messages that have arrived, because the server drops an ingress that does not read."""
    while friend.socket.poll(0):
        friend.socket.recv()


def rejected(server: WireServer) -> int:
    return sum(server.counts[kind] for kind in ("malformed", "unauthenticated", "refused", "replayed"))


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_malformed_message_is_counted_and_that_is_all(
    server: WireServer, context: zmq.Context[zmq.Socket[bytes]], friend: BarePeer, name: str, is_known: bool
) -> None:
    sender = friend if is_known else BarePeer(context, server)
    before = server.counts["malformed"]
    sender.send(MALFORMED[name])
    wait_until(lambda: server.counts["malformed"] == before + 1)
    friend.receive(messages.Heartbeat)
    assert server.counts["failed"] == 0


def test_a_malformed_message_does_not_end_the_engine_s_thread(
    server: WireServer, context: zmq.Context[zmq.Socket[bytes]], friend: BarePeer
) -> None:
    """It publishes while the wire's thread receives."""
    stranger = BarePeer(context, server)
    server.open(ask("s"), "friend")
    before = server.counts["malformed"]
    for number in range(50):
        stranger.send(NESTED)
        server.publish([StreamDelta("s", [number])])
    tokens: list[int] = []
    while len(tokens) < 50:
        tokens += [token for output in friend.receive(messages.Tokens).deltas for token in output.token_ids]
    assert tokens == list(range(50))
    wait_until(lambda: server.counts["malformed"] == before + 50)


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(shapeless | tagged, min_size=1, max_size=10))
def test_any_message_of_a_stranger_is_counted(
    server: WireServer, context: zmq.Context[zmq.Socket[bytes]], friend: BarePeer, batch: list[bytes]
) -> None:
    stranger = BarePeer(context, server)
    before = rejected(server)
    for message in batch:
        stranger.send(message)
    wait_until(lambda: rejected(server) == before + len(batch))
    stranger.socket.close()
    assert server.counts["failed"] == 0
    assert server.is_connected("friend")
    catch_up(friend)


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(shapeless | tagged, min_size=1, max_size=10))
def test_no_message_of_an_ingress_stops_the_service_for_others(
    server: WireServer, context: zmq.Context[zmq.Socket[bytes]], friend: BarePeer, batch: list[bytes]
) -> None:
    """Even an ingress with the key can break only its own session, not the server."""
    confused = BarePeer(context, server)
    confused.send(hello(f"confused {time.time_ns()}"))
    confused.receive(messages.Welcome)
    for message in batch:
        confused.send(message)
    confused.send(hello(f"confused again {time.time_ns()}"))
    confused.receive(messages.Welcome)  # all earlier messages have been handled
    assert server.counts["failed"] == 0
    confused.socket.close()
    assert server.is_connected("friend")
    catch_up(friend)


def test_a_message_larger_than_any_hello_ends_its_own_connection(
    server: WireServer, context: zmq.Context[zmq.Socket[bytes]], friend: BarePeer
) -> None:
    stranger = BarePeer(context, server)
    stranger.send(b"\x00" * (MAX_REQUEST_BYTES + 1))
    for _ in range(5):
        friend.receive(messages.Heartbeat)
    assert server.counts["failed"] == 0


# --- the ingress's end --------------------------------------------------------------------------------------


EPOCH = 5
UNWELCOME: dict[str, bytes] = {
    "tokens before a welcome": messages.encode(messages.Tokens(EPOCH, 0, [StreamDelta("a", [1])])),
    "load before a welcome": messages.encode(messages.Heartbeat(EPOCH, 0, messages.Load())),
    "hashes before a welcome": messages.encode(messages.PrefixDelta(EPOCH, 0, messages.pack_hashes([1]), b"")),
    "a welcome of another start": messages.encode(messages.Welcome(EPOCH + 1, 0, "r0", "", 16)),
    "a snapshot of another start": messages.encode(messages.PrefixSnapshot(EPOCH + 1, 0, b"", True, True)),
}


async def say_to_ingress(batch: list[bytes]) -> tuple[WireConnection, Silence]:
    """Return a connection to which an impostor at its replica's address sent all of `batch`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    replica, address = impostor(context, EPOCH)
    listener = Silence()
    connection = WireConnection(context, address, "i", listener, time.monotonic)
    try:
        while not replica.poll(0):
            await asyncio.sleep(0.002)
        identity, _ = replica.recv_multipart()
        for message in batch:
            replica.send_multipart([identity, message])
        async with asyncio.timeout(60):
            while sum(connection.counts.values()) < len(batch):
                await asyncio.sleep(0.002)
                connection.receive_all()
    finally:
        connection.close()
        replica.close()
        context.destroy(linger=0)
    return connection, listener


@pytest.mark.parametrize("name", sorted(MALFORMED.keys() - {"of the other direction"}))
def test_a_malformed_message_of_a_replica_is_counted(name: str) -> None:
    connection, listener = asyncio.run(say_to_ingress([MALFORMED[name]]))
    assert (connection.counts, listener.calls) == ({"malformed": 1}, [])


@pytest.mark.parametrize("name", UNWELCOME)
def test_nothing_is_accepted_from_a_replica_that_has_not_identified_itself(name: str) -> None:
    connection, listener = asyncio.run(say_to_ingress([UNWELCOME[name]]))
    assert sum(connection.counts.values()) == 1
    assert connection.counts["malformed"] == 0
    assert not connection.is_answering
    assert set(listener.calls) <= {"answering"}  # that it does not answer


@settings(max_examples=examples(25), deadline=None)
@given(batch=st.lists(shapeless | tagged, min_size=1, max_size=10))
def test_any_message_of_an_impostor_is_counted(batch: list[bytes]) -> None:
    connection, listener = asyncio.run(say_to_ingress(batch))
    assert sum(connection.counts.values()) == len(batch)
    assert set(listener.calls) <= {"answering"}
