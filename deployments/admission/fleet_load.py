"""The `LoadView` of an ingress, computed from its router's state in this process.

An engine's wait is the router's Q (`router/cost.py`): queued prompts at the rate that the engine has measured, and
places in its batch. A request that is not placed yet counts with the tokens that it must compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from deployments.client.protocol import GenerateRequest
from router.fleet import Fleet


class FleetLoad:
    """Computes the load from a fleet that the router keeps up to date."""

    def __init__(
        self,
        fleet: Fleet,
        uncached_tokens: Callable[[GenerateRequest], int],
        is_engine_expected: Callable[[], bool] = lambda: False,
    ) -> None:
        """`uncached_tokens` returns the number of a request's tokens that no engine has cached.
        `is_engine_expected` says whether requests wait while no engine is up.
        """
        self._fleet, self._uncached_tokens = fleet, uncached_tokens
        self._is_engine_expected = is_engine_expected

    def queue_seconds(self, num_sending: int) -> float:
        """Return the least wait that the router expects; infinite while all answering engines' queues are full, or
        none is up and one is expected. If all circuits are open, all engines are tried, so the wait is 0.
        """
        shortest = self._fleet.shortest_queue()
        if shortest is None:
            counts = self._fleet.count_by_state()
            is_expected = self._is_engine_expected() and not counts["circuit_open"]
            return math.inf if counts["available"] or is_expected else 0.0
        wait_s, rate = shortest
        return wait_s + num_sending / rate  # unplaced requests will go to an idle replica

    def given_way(self, tenants: Collection[str], num_sending: int) -> set[str]:
        """Return those of `tenants` for which another tenant's request would be preempted at a full engine."""
        return self._fleet.given_way(tenants, num_sending)

    def num_idle(self) -> int:
        """Return the free places in the batches of the answering engines without waiting requests."""
        return self._fleet.num_idle()

    @property
    def has_engines(self) -> bool:
        """Whether requests can be sent to any engine."""
        counts = self._fleet.count_by_state()
        return counts["available"] + counts["circuit_open"] > 0

    def uncached_tokens(self, request: GenerateRequest) -> int:
        """Return the predicted number of uncached tokens."""
        return self._uncached_tokens(request)
