"""An ingress that sends too much, or without end, costs others nothing; nothing is left of one that is gone."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from deployments.wire import messages
from deployments.wire.outbox import MAX_BATCH_BYTES
from deployments.wire.server import WireServer, WireTimings
from engine.values.stream_delta import StreamDelta
from router.addresses import ReplicaAddress
from tests.deployments.support import raw_peer
from tests.deployments.support.forked import forked
from tests.deployments.support.wire_peer import BarePeer, Requests, address_of, ask, hello, served, wait_until

TIMINGS = WireTimings(0.02, keep_ended_s=0.1, absent_ingress_s=0.1)


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
def server(requests: Requests) -> Iterator[WireServer]:
    made = served(requests, TIMINGS)
    yield made
    made.close()


def connected(server: WireServer, context: zmq.Context[zmq.Socket[bytes]], name: str = "friend") -> BarePeer:
    made = BarePeer(context, server)
    made.send(hello(name))
    made.receive(messages.Welcome)
    return made


# --- more messages than a replica can take in ---------------------------------------------------------------


def send_without_end(address: ReplicaAddress, message: bytes) -> None:
    from deployments.wire.sockets import connect_dealer

    with zmq.Context() as context, connect_dealer(context, address) as socket:
        while True:
            socket.send(message)


@pytest.fixture(params=[b"\xc1", messages.encode(messages.Abort("a"))], ids=["garbage", "before its hello"])
def flooded(server: WireServer, request: pytest.FixtureRequest) -> Iterator[WireServer]:
    """A server to which another process sends as fast as it can."""
    process = forked().Process(target=send_without_end, args=(address_of(server), request.param), daemon=True)
    process.start()
    wait_until(lambda: sum(server.counts.values()) > 5_000)
    yield server
    process.kill()
    process.join()


def test_a_flood_stops_neither_heartbeats_nor_tokens_nor_requests(
    flooded: WireServer, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    friend = connected(flooded, context)
    for number in range(20):
        friend.receive(messages.Heartbeat)
        friend.send(ask(f"request {number}"))
        friend.receive(messages.Tokens)
        flooded.publish([StreamDelta(f"request {number}", [number], finish_reason="length")])
        assert friend.receive(messages.Tokens).deltas[0].token_ids == [number]
    assert flooded.counts["failed"] == 0


class Held(Requests):
    """Takes in the first message when it is told to, when others wait behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_continue = threading.Event()
        self.at_heartbeats: list[int] = []
        """Messages taken in at each heartbeat since it went on."""

    def on_withdrawn(self, ingress_id: str, request_id: str) -> None:
        super().on_withdrawn(ingress_id, request_id)
        self.may_continue.wait(60)

    def load(self) -> messages.Load:
        if self.may_continue.is_set():
            self.at_heartbeats.append(len(self.withdrawn))
        return messages.Load()


@pytest.mark.parametrize(("bound", "most"), [("TURN_MESSAGES", 5), ("TURN_BYTES", 1)])
def test_heartbeats_come_between_batches_of_messages(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(f"deployments.wire.server.{bound}", most)
    held = Held()
    server = served(held, TIMINGS, load=held.load)
    friend = connected(server, context)
    for number in range(500):
        friend.send(messages.Abort(f"a{number}"))
    wait_until(lambda: bool(held.withdrawn))
    time.sleep(0.2)  # the others arrive, and a heartbeat is due: without this, nothing would be noticed
    held.may_continue.set()
    wait_until(lambda: len(held.withdrawn) == 500)
    server.close()
    assert held.at_heartbeats[0] <= most


# --- messages that never end --------------------------------------------------------------------------------


def test_a_message_that_never_ends_ends_its_connection(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even that of an ingress with the key, which only the kernel's count gives away."""
    monkeypatch.setattr("deployments.wire.peers.MAX_UNFINISHED_BYTES", 2**22)
    server = served(Requests(), TIMINGS, encrypt=False)
    friend = connected(server, context)
    part = raw_peer.frame(raw_peer.MORE, bytes(65536))
    with raw_peer.admitted(server) as endless, pytest.raises(ConnectionError):
        while True:
            endless.sendall(part)
    wait_until(lambda: server.counts["endless"] == 1)
    friend.receive(messages.Heartbeat)
    server.close()


def test_long_requests_are_no_message_that_never_ends(
    server: WireServer, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.wire.peers.MAX_UNFINISHED_BYTES", 2**22)
    friend = connected(server, context)
    for number in range(20):
        friend.send(ask(f"request {number}", prompt=range(500_000)))
        friend.receive(messages.Tokens)
    assert server.counts["endless"] == 0


def test_a_message_of_many_parts_is_dropped_and_ends_its_connection(
    server: WireServer, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    friend, other = connected(server, context), BarePeer(context, server)
    events = other.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    other.socket.send_multipart([b""] * 10_000)
    assert events.poll(60_000) and recv_monitor_message(events)
    friend.receive(messages.Heartbeat)
    friend.send(ask("a"))
    friend.receive(messages.Tokens)
    assert server.counts["malformed"] == 1


# --- more tokens than go into a message ---------------------------------------------------------------------


def test_a_backlog_comes_in_several_messages_in_which_all_streams_have_their_turn(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    server = served(Requests(), WireTimings(0.02, keep_ended_s=60))
    tokens = {f"s{number}": list(range(2**20, 2**20 + 100_000 * (number + 1))) for number in range(4)}
    for name in tokens:
        server.open(ask(name), "late")
    server.publish([StreamDelta(name, list(ids), finish_reason="length") for name, ids in tokens.items()])
    late = BarePeer(context, server)
    late.send(hello("late"))
    received: dict[str, list[int]] = {name: [] for name in tokens}
    ends: list[str] = []
    while len(ends) < len(tokens):
        data = late.socket.recv()
        assert len(data) < MAX_BATCH_BYTES + 10_000
        message = messages.decode_to_ingress(data)
        for delta in message.deltas if isinstance(message, messages.Tokens) else ():
            assert delta.start == len(received[delta.request_id])
            received[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                ends.append(delta.request_id)
    assert received == tokens
    assert ends == sorted(ends)  # the shortest first
    server.close()


# --- what is left of a peer ---------------------------------------------------------------------------------


def entries(owner: Any, path: str = "") -> Counter[str]:
    """Count the entries of all containers that an object of the wire holds, by the path to them."""
    found: Counter[str] = Counter()
    for name, value in vars(owner).items():
        if isinstance(value, dict | set | list) and name not in ("counts", "_counts"):
            found[f"{path}{name}"] = len(value)
        elif type(value).__module__.startswith("deployments.wire") and hasattr(value, "__dict__"):
            found += entries(value, f"{path}{name}.")
    return +found


def test_two_hundred_restarts_of_an_ingress_leave_nothing(
    server: WireServer, context: zmq.Context[zmq.Socket[bytes]], requests: Requests
) -> None:
    """Each has a stream that ends unread and one that it leaves running, which is aborted."""
    connected(server, context, "first").socket.close()
    wait_until(lambda: not entries(server))
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        ingress = connected(server, context, f"ingress {number}")
        for kind in ("ended", "running"):
            ingress.send(ask(f"{kind} {number}"))
            ingress.receive(messages.Tokens)
        assert server.num_ingresses and server.num_kept >= 2
        ingress.socket.close()
        server.publish([StreamDelta(f"ended {number}", [1], finish_reason="length")])
    running = {f"running {number}" for number in range(200)}
    # So may others be, whose end came after their ingress had been missed.
    wait_until(lambda: running <= set(requests.aborted))
    server.publish([StreamDelta(name, finish_reason="abort") for name in running])
    wait_until(lambda: not entries(server))
    assert server.num_ingresses == server.num_kept == 0
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_a_connection_is_one_ingress_s(server: WireServer, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Whoever takes a new name on the same connection gives up the old one."""
    peer = connected(server, context, "name 0")
    for number in range(1, 50):
        peer.send(hello(f"name {number}"))
        peer.receive(messages.Welcome)
    assert [server.is_connected(f"name {number}") for number in range(50)] == [False] * 49 + [True]


def test_a_request_of_an_absent_ingress_is_aborted_once(server: WireServer, requests: Requests) -> None:
    """The engine may be in a long step, or have ended: nobody would take further aborts off its inbox."""
    server.open(ask("a"), "gone")
    wait_until(lambda: bool(requests.aborted))
    server.open(ask("b"), "also gone")
    wait_until(lambda: "b" in requests.aborted)  # many heartbeats later
    assert requests.aborted == ["a", "b"]
