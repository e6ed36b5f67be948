"""A watcher of replicas' processes whose deaths a test tells."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from deployments.client.replica_watch import ReplicaDied


class Deaths:
    """Reports a replica's death after `tell`."""

    def __init__(self) -> None:
        self._told: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def tell(self, replica: str) -> None:
        self._told[replica].set()

    async def watch(self, replica: str, ingress_id: str) -> None:
        await self._told[replica].wait()
        raise ReplicaDied("its process died")
