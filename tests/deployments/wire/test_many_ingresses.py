"""What a replica does for each of its ingresses does not grow with their number."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from deployments.wire import messages
from deployments.wire.server import WireServer, WireTimings
from tests.deployments.support.wire_peer import BarePeer, Requests, ask, hello, served
from tests.support.count_calls import count_calls

SELDOM = WireTimings(heartbeat_s=600.0, keep_ended_s=600.0, absent_ingress_s=600.0)


@contextmanager
def told(num_ingresses: int, server: WireServer) -> Iterator[list[BarePeer]]:
    """Connect ingresses, each with an unfinished stream."""
    with zmq.Context() as context:
        peers = [BarePeer(context, server) for _ in range(num_ingresses)]
        for number, peer in enumerate(peers):
            peer.send(hello(f"i{number}"))
            peer.receive(messages.Welcome)
            server.open(ask(f"s{number}"), f"i{number}")
        yield peers
        for peer in peers:
            peer.socket.close()


def steps_of_a_tick(num_ingresses: int) -> int:
    """Return the calls of a tick in which each ingress is due to hear of the load."""
    server = served(Requests(), SELDOM)
    try:
        with told(num_ingresses, server), server._lock:
            now = time.monotonic() + 1000.0
            return count_calls(lambda: server._tick(now))
    finally:
        server.close()


def test_reporting_the_load_to_an_ingress_takes_as_many_steps_among_many_others() -> None:
    none, few, many = (steps_of_a_tick(number) for number in (0, 16, 256))
    assert few - none >= 16 * 5  # they were told
    assert many - none <= 16.5 * (few - none)


def test_the_engine_is_asked_for_its_load_once_for_all_ingresses() -> None:
    asked = itertools.count()
    server = WireServer(
        "127.0.0.1", "r0", lambda: messages.Load(num_running=next(asked)), Requests(), WireTimings(0.1)
    )
    server.start()
    try:
        with told(16, server) as peers:
            heard = [peer.receive(messages.Heartbeat).load.num_running for _ in range(5) for peer in peers]
            assert len(heard) == 80 and len(set(heard)) <= 20
    finally:
        server.close()
