"""The `LoadView` of an ingress, computed from its router's state in this process.

An engine's wait is the router's Q (`router/cost.py`): queued prompts at the rate that the engine has measured, and
places in its batch. A request on its way through Serve counts by the tokens it has to compute, not by the time it
spends there, so that engines do not run idle however slow Serve is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from deployments.client.protocol import GenerateRequest
from router.cost import queue_seconds
from router.fleet import Fleet


class FleetLoad:
    """Computes the load from a fleet that the router keeps up to date."""

    def __init__(self, fleet: Fleet, uncached_tokens: Callable[[GenerateRequest], int]) -> None:
        """`uncached_tokens` returns the number of a request's tokens that no engine has cached."""
        self._fleet, self._uncached_tokens = fleet, uncached_tokens

    def queue_seconds(self, sending: Mapping[str, int]) -> float:
        """Return the least wait that the router expects; infinite while all answering engines' queues are full."""
        fleet = self._fleet
        up = [state for state in fleet.candidates(fleet.names()) if state.is_available]
        if not up:
            return math.inf if fleet.count_by_state()["available"] else 0.0
        # Placed requests count at their replica. The others will go to a replica with little to do.
        on_the_way = sum(tokens for id_, tokens in sending.items() if fleet.placement(id_) is None)
        rate = sum(state.prefill_rate for state in up)
        return min(queue_seconds(state) for state in up) + on_the_way / rate

    def uncached_tokens(self, request: GenerateRequest) -> int:
        """Return the predicted number of uncached tokens."""
        return self._uncached_tokens(request)
