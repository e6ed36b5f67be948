"""What the tests of the wire share: sockets to a module's `server`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from deployments.wire.server import WireServer
from tests.deployments.support.wire_peer import BarePeer, Peer


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def peer(server: WireServer, context: zmq.Context[zmq.Socket[bytes]]) -> Peer:
    return lambda: BarePeer(context, server)
