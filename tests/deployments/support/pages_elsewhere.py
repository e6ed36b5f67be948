"""A process with pages that others read. It imports little, because agents that wait for it take a core."""

from __future__ import annotations

from multiprocessing.connection import Connection

from deployments.replica.kv_fetch import messages
from deployments.replica.kv_fetch.messages import Readable, Region
from deployments.replica.kv_fetch.nixl_agent import NixlAgent
from tests.deployments.support.lent_pages import Pages


def keep_pages(pipe: Connection) -> None:
    """Send where 12 pages lie, and keep them until something is received."""
    pages = Pages(1)
    agent = NixlAgent(pages.regions())
    device, host = (Region(None, list(region.starts), region.stride) for region in pages.regions())
    pipe.send(messages.encode(Readable(1, agent.metadata, device, list(range(12)), host, [])))
    pipe.recv()
