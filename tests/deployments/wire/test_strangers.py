"""Who has no key cannot connect to the wire, cannot read it, and cannot disturb it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from deployments.wire import messages
from deployments.wire.handshake import Keys
from deployments.wire.server import WireServer, WireTimings
from engine.values.stream_delta import StreamDelta
from tests.deployments.support import raw_peer
from tests.deployments.support.wire_peer import BarePeer, Requests, address_of, ask, hello, served, wait_until

PROMPT = [1_234_567, 7_654_321, 1_357_911]


@pytest.fixture(params=[True, False], ids=["encrypted", "plain"])
def encrypts(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def server(encrypts: bool) -> Iterator[WireServer]:
    made = served(Requests(), WireTimings(0.02), encrypt=encrypts, handshake_s=0.5)
    yield made
    made.close()


def check_that_an_ingress_is_served(server: WireServer, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    friend = BarePeer(context, server)
    friend.send(hello())
    assert friend.receive(messages.Welcome).replica == "r0"


@pytest.mark.parametrize(
    ("encrypts", "wrong"),
    [
        (True, "the ingresses' key"),
        (True, "the replica's key"),
        (True, "the mechanism"),
        (True, "no key at all"),
        (False, "the ingresses' key"),
        (False, "no key at all"),
    ],
)
def test_a_peer_without_a_key_is_not_heard(
    server: WireServer, context: zmq.Context[zmq.Socket[bytes]], wrong: str
) -> None:
    drawn = Keys.drawn()
    if wrong == "no key at all":
        dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(server.endpoint)
    else:
        keys: dict[str, Any] = {
            "the ingresses' key": {"secret": drawn.ingress_secret.decode()},
            "the replica's key": {"public_key": drawn.public.decode()},
            "the mechanism": {"public_key": ""},
        }[wrong]
        dealer = BarePeer(context, server, **keys).socket
    with contextlib.suppress(zmq.Again):  # the handshake has failed already, and it would wait for another
        dealer.send(messages.encode(hello()), zmq.NOBLOCK)
    wait_until(lambda: server.counts["handshake"] > 0)
    assert not server.is_connected("i")
    assert set(server.counts) == {"handshake"}
    check_that_an_ingress_is_served(server, context)


def test_a_silent_connection_is_ended(server: WireServer) -> None:
    with raw_peer.connect(server) as silent:
        raw_peer.wait_for_end(silent)


def test_a_stranger_s_endless_message_ends_with_its_connection(server: WireServer) -> None:
    with raw_peer.connect(server) as stranger:
        stranger.sendall(raw_peer.greeting(b"NULL") + raw_peer.ready(b"READY"))
        with pytest.raises(ConnectionError):
            while True:
                stranger.sendall(raw_peer.frame(raw_peer.MORE, bytes(65536)))


def test_an_eavesdropper_reads_nothing_if_the_wire_is_encrypted(
    server: WireServer, context: zmq.Context[zmq.Socket[bytes]], encrypts: bool
) -> None:
    """Neither a prompt's tokens nor an answer's, nor the key."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=overhear, args=(listener, server, heard), daemon=True).start()
        ingress = BarePeer(context, server, endpoint=f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        ingress.send(hello())
        ingress.receive(messages.Welcome)
        ingress.send(ask("a", prompt=PROMPT))
        ingress.receive(messages.Tokens)
        server.publish([StreamDelta("a", PROMPT)])
        assert ingress.receive(messages.Tokens).deltas[0].token_ids == PROMPT
    told = [messages.pack_tokens(PROMPT), messages.encode(PROMPT), server.secret.encode()]
    assert [text in heard for text in told] == [not encrypts] * 3


def overhear(listener: socket.socket, server: WireServer, heard: bytearray) -> None:
    """Pass one connection on to the server, and keep what goes over it."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                heard.extend(data)
                target.sendall(data)
        except OSError:
            pass

    near, _ = listener.accept()
    with near, raw_peer.connect(server) as far:
        back = threading.Thread(target=pump, args=(far, near), daemon=True)
        back.start()
        pump(near, far)
        far.shutdown(socket.SHUT_RDWR)
        back.join()


def test_an_address_is_printed_without_its_key(server: WireServer) -> None:
    assert server.secret not in repr(address_of(server))


def test_every_replica_draws_keys_of_its_own() -> None:
    servers = [served(Requests(), WireTimings()) for _ in range(2)]
    assert len({key for server in servers for key in (server.secret, server.public_key)}) == 4
    for server in servers:
        server.close()
