"""A budget for one turn of the event loop, shared by many callbacks that may all be due together.

Hundreds of connections may have news of caches, after a pause or when an ingress is new, and hundreds of streams
may have lost their replica. Without the budget, one turn would do all of it, while every other stream waits.
"""

from __future__ import annotations

import asyncio

TURN_BLOCKS = 8192
"""Blocks after which the rest waits for the event loop's next turn: about 10 ms. The last message may exceed it.
"""


class TurnBudget:
    """Counts the work done since the event loop's last turn. Lives on one event loop."""

    def __init__(self, most: int) -> None:
        self._most, self._spent = most, 0

    @property
    def is_spent(self) -> bool:
        """Whether all other work must wait for the next turn."""
        return self._spent >= self._most

    def spend(self, amount: int) -> None:
        """Note that so much work was done."""
        if amount and not self._spent:
            # Work that waits for the next turn is called after this, because it is deferred later.
            asyncio.get_running_loop().call_soon(self._renew)
        self._spent += amount

    def _renew(self) -> None:
        self._spent = 0
