"""Serve's handles of one model's engine deployments: of one, or of one for each role."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from deployments.config.roles import Pool
from deployments.control.ask_all import ask_all
from router.fleet import Fleet


class EngineHandles:
    """Calls a model's replicas through Serve, whichever deployment they belong to."""

    def __init__(self, handles: Mapping[str, Any], pools: Mapping[str, Pool], fleet: Fleet) -> None:
        """`handles` has those of all models by deployment, `pools` the purposes of this model's deployments;
        `fleet` knows the roles of its replicas.
        """
        self.counts = {name: pool.num_when_loaded for name, pool in pools.items()}
        """How many replicas each deployment has at first when the model is loaded."""
        self._by_role: dict[str, Any] = {pool.role or "": handles[name] for name, pool in pools.items()}
        self._fleet = fleet

    def of(self, replica: str) -> Any:
        """Return the handle of a replica's deployment, for a replica that the fleet knows."""
        address = self._fleet.addresses().get(replica)
        return self._by_role.get("" if address is None else address.role, next(iter(self._by_role.values())))

    async def start_routers(self) -> None:
        """Have each handle make its router, which fills the fleet; return when a replica of each has answered."""
        await asyncio.gather(*(handle.describe.remote() for handle in self._by_role.values()))

    async def ask_all(self, method: str) -> list[Any]:
        """Return the answer of each known replica, as `ask_all` does."""
        answers = await asyncio.gather(*(ask_all(handle, method) for handle in self._by_role.values()))
        return [answer for each in answers for answer in each]
