"""The metrics hub's own HTTP server."""

from __future__ import annotations

import logging
from logging.handlers import MemoryHandler

from deployments.hub.server import MetricsServer, listen


async def no_page() -> tuple[bytes, str]:
    return b"", "text/plain"


def test_the_server_leaves_the_process_s_logging_as_it_is() -> None:
    """Serve's logs go through a handler of this kind, by which a new controller knows the replicas of the last."""
    target = logging.NullHandler()
    handler = MemoryHandler(10, target=target)
    listener = listen("127.0.0.1", 0)
    try:
        MetricsServer(listener, no_page)
        assert handler.target is target
    finally:
        listener.close()
        handler.close()
