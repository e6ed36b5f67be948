"""The ingress's end of the wire: how it introduces itself, and when it connects anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import zmq

from deployments.wire import messages
from deployments.wire.connection import HELLO_S, SILENT_HELLOS, WireConnection
from deployments.wire.server import WireServer, WireTimings
from tests.deployments.support.silent_listener import Silence
from tests.deployments.support.time_limit import run_scenario
from tests.deployments.support.wire_peer import Requests, address_of, impostor, served


class Deaf:
    """A replica's port at which hellos arrive and nothing is answered."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket, self.address = impostor(self.context)

    async def heard(self) -> tuple[bytes, messages.Hello]:
        """Wait for the next hello; return the identity of its connection too."""
        while not self.socket.poll(0):
            await asyncio.sleep(0.002)
        identity, data = self.socket.recv_multipart()
        hello = messages.decode_to_replica(data)
        assert isinstance(hello, messages.Hello)
        return identity, hello


@pytest.fixture
def deaf() -> Iterator[Deaf]:
    made = Deaf()
    yield made
    made.context.destroy(linger=0)


def test_after_unanswered_hellos_an_ingress_reconnects_under_another_identity(deaf: Deaf) -> None:
    """Its connection may be half open, in a way that ZeroMQ does not notice."""

    async def scenario() -> None:
        now = 0.0
        connection = WireConnection(deaf.context, deaf.address, "i", Silence(), lambda: now)
        identities = [(await deaf.heard())[0]]
        for _ in range(2 * SILENT_HELLOS):
            for _ in range(3):
                now += HELLO_S / 2
                connection.tick()
            identities.append((await deaf.heard())[0])
        assert len(set(identities[:SILENT_HELLOS])) == 1
        assert len(set(identities)) == 3
        connection.close()

    run_scenario(scenario())


def test_a_replica_is_not_lost_because_this_process_stood_still(deaf: Deaf) -> None:
    """What it sent meanwhile has yet to arrive: ZeroMQ's thread stood still too. Its silence afterwards counts."""

    async def scenario() -> None:
        now = 0.0
        connection = WireConnection(deaf.context, deaf.address, "i", Silence(), lambda: now, lost_after_s=3.0)

        def tick(*periods: float) -> None:
            nonlocal now
            for period in periods:
                now += period
                connection.tick()

        tick(*[0.1] * 15, 60.0)  # as after a pause of its virtual machine
        assert not connection.is_lost
        tick(*[0.1] * 12)
        assert connection.is_lost
        connection.close()

    run_scenario(scenario())


def test_hellos_are_numbered_however_the_clock_steps(deaf: Deaf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a later connection to the same replica: a replica drops what is numbered lower."""
    clock = iter(range(10**18, 0, -3600 * 10**9))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))

    async def scenario() -> None:
        numbers = []
        for _ in range(2):
            connection = WireConnection(deaf.context, deaf.address, "i", Silence(), time.monotonic)
            connection.hello()
            numbers += [(await deaf.heard())[1].number for _ in range(2)]
            connection.close()
        assert numbers == sorted(set(numbers))

    run_scenario(scenario())


@pytest.mark.parametrize("encrypts", [True, False])
def test_an_ingress_that_reconnects_is_welcomed(encrypts: bool) -> None:
    server: WireServer = served(Requests(), WireTimings(0.02), encrypt=encrypts)

    async def scenario() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        connection = WireConnection(context, address_of(server), "i", Silence(), time.monotonic)
        while not connection.is_answering:
            await asyncio.sleep(0.002)
        connection.close()
        again = WireConnection(context, address_of(server), "i", Silence(), time.monotonic)
        while not again.is_answering:
            await asyncio.sleep(0.002)
        again.close()
        await asyncio.to_thread(context.term)

    run_scenario(scenario())
    server.close()
