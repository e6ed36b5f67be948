"""The `LoadView` of an ingress: what its router knows of the engines, in this process's memory.

An engine's wait is the router's Q (`router/cost.py`): prompts before a new one at the rate that the engine has
measured, and places in its batch. What is still on its way there, through Serve, counts with the tokens it will
have to compute and not with the time that the way takes: however slow that is, engines do not run dry for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from deployments.client.protocol import GenerateRequest
from router.cost import queue_seconds
from router.fleet import Fleet


class FleetLoad:
    """Reads a fleet that others keep up to date."""

    def __init__(self, fleet: Fleet, uncached_tokens: Callable[[GenerateRequest], int]) -> None:
        """`uncached_tokens` says how many tokens of a request no engine has cached."""
        self._fleet, self._uncached_tokens = fleet, uncached_tokens

    def queue_seconds(self, sending: Mapping[str, int]) -> float:
        """As the router expects; infinite while the queues of all that answer are full."""
        fleet = self._fleet
        up = [state for state in fleet.candidates(fleet.names()) if state.is_available]
        if not up:
            return math.inf if fleet.count_by_state()["available"] else 0.0
        # What is placed counts at its replica. Nobody knows yet where the rest goes: somewhere with little to do.
        on_the_way = sum(tokens for id_, tokens in sending.items() if fleet.placement(id_) is None)
        rate = sum(state.prefill_rate for state in up)
        return min(queue_seconds(state) for state in up) + on_the_way / rate

    def uncached_tokens(self, request: GenerateRequest) -> int:
        """As predicted."""
        return self._uncached_tokens(request)
