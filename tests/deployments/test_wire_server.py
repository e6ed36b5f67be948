"""The replica's socket, spoken to as a stranger or a broken ingress would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from deployments import wire
from deployments.wire_server import WireServer, WireTimings
from engine.load import EngineLoad
from engine.plan import Event

Peer = Callable[[], "Dealer"]


class Dealer:
    """A bare peer."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def say(self, message: Any) -> None:
        self.socket.send(message if isinstance(message, bytes) else wire.encode(message))

    def hear(self, kind: type, timeout: float = 3.0) -> Any:
        """The next message of that kind."""
        deadline = time.monotonic() + timeout
        while self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            message = wire.decode_to_ingress(self.socket.recv())
            if isinstance(message, kind):
                return message
        raise TimeoutError(kind.__name__)


@pytest.fixture
def aborted() -> list[str]:
    return []


@pytest.fixture
def server(aborted: list[str]) -> Iterator[WireServer]:
    timings = WireTimings(heartbeat_s=0.02, keep_ended_s=0.3, absent_ingress_s=0.3)
    made = WireServer("127.0.0.1", "r0", EngineLoad, aborted.append, timings)
    yield made
    made.close()


@pytest.fixture
def peer(server: WireServer) -> Iterator[Peer]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield lambda: Dealer(context, server.endpoint)
    context.destroy(linger=0)


def hello(server: WireServer, ingress: str = "i", **received: int) -> wire.Hello:
    return wire.Hello(wire.WIRE_VERSION, server.secret, ingress, received)


def until(condition: Callable[[], bool], timeout: float = 3.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_wrong_secret_is_refused_and_hears_nothing_else(server: WireServer, peer: Peer) -> None:
    stranger = peer()
    stranger.say(wire.Hello(wire.WIRE_VERSION, "guess", "i", {}))
    assert "secret" in stranger.hear(wire.Refused).reason
    with pytest.raises(TimeoutError):
        stranger.hear(wire.Heartbeat, timeout=0.1)


def test_another_version_is_refused_with_both_named(server: WireServer, peer: Peer) -> None:
    old = peer()
    old.say(wire.Hello(0, server.secret, "i", {}))
    assert old.hear(wire.Refused).reason.count("version") == 2


def test_garbage_and_messages_before_a_hello_are_dropped_and_counted(
    server: WireServer, peer: Peer, aborted: list[str]
) -> None:
    stranger = peer()
    server.open("a", "i")
    for message in (b"", b"\xff" * 100, b"\x93\x01", wire.Abort("a"), wire.Resume({"a": 0})):
        stranger.say(message)
    stranger.socket.send_multipart([b"three", b"frames"])
    until(lambda: sum(server.counts.values()) == 6)
    assert server.counts == {"malformed": 4, "unauthenticated": 2}
    assert aborted == []
    friend = peer()
    friend.say(hello(server))
    assert friend.hear(wire.Welcome).replica == "r0"


def test_heartbeats_come_as_long_as_somebody_listens(server: WireServer, peer: Peer) -> None:
    ingress = peer()
    ingress.say(hello(server))
    first = ingress.hear(wire.Welcome)
    began = time.monotonic()
    for number in range(5):
        assert ingress.hear(wire.Heartbeat).seq == first.seq + 1 + number
    assert time.monotonic() - began < 1.0
    ingress.socket.close()
    until(lambda: not server.is_connected("i"))


def test_tokens_produced_before_the_hello_wait_for_it(server: WireServer, peer: Peer) -> None:
    server.open("a", "i")
    server.publish([Event("a", (1, 2))])
    server.publish([Event("a", (3,), finish_reason="length")])
    ingress = peer()
    ingress.say(hello(server))
    (output,) = ingress.hear(wire.Tokens).outputs
    assert (output.start, output.token_ids, output.finish_reason) == (0, [1, 2, 3], "length")


def test_a_reconnecting_ingress_gets_what_it_missed(server: WireServer, peer: Peer) -> None:
    ingress = peer()
    ingress.say(hello(server))
    ingress.hear(wire.Welcome)
    server.open("a", "i")
    server.accept("a", "i")
    assert ingress.hear(wire.Tokens).outputs[0].token_ids == []
    server.publish([Event("a", (1, 2, 3))])
    ingress.socket.close()
    again = peer()
    again.say(hello(server, a=1))
    (output,) = again.hear(wire.Tokens).outputs
    assert (output.start, output.token_ids) == (1, [2, 3])


def test_a_step_is_one_message_per_ingress(server: WireServer, peer: Peer) -> None:
    one, two = peer(), peer()
    one.say(hello(server, "one"))
    two.say(hello(server, "two"))
    one.hear(wire.Welcome), two.hear(wire.Welcome)
    for number in range(6):
        server.open(f"s{number}", "one" if number < 4 else "two")
    server.publish([Event(f"s{number}", (number,)) for number in range(6)])
    assert [output.token_ids for output in one.hear(wire.Tokens).outputs] == [[0], [1], [2], [3]]
    assert [output.token_ids for output in two.hear(wire.Tokens).outputs] == [[4], [5]]


def test_an_ingress_ends_only_its_own_requests(server: WireServer, peer: Peer, aborted: list[str]) -> None:
    one = peer()
    one.say(hello(server, "one"))
    one.hear(wire.Welcome)
    server.open("mine", "one")
    server.open("theirs", "two")
    one.say(wire.Abort("theirs"))
    one.say(wire.Abort("mine"))
    until(lambda: "mine" in aborted)
    assert "theirs" not in aborted


def test_requests_of_an_ingress_that_never_comes_back_are_aborted(server: WireServer, aborted: list[str]) -> None:
    server.open("a", "gone")
    until(lambda: "a" in aborted)


def test_a_stream_that_was_forgotten_is_reported_lost(server: WireServer, peer: Peer) -> None:
    ingress = peer()
    ingress.say(hello(server))
    ingress.hear(wire.Welcome)
    ingress.say(wire.Resume({"ghost": 7}))
    assert ingress.hear(wire.Unknown).request_ids == ["ghost"]
