"""How much an ingress takes in of the replicas' caches in one turn of its event loop, from all of them together.

Each connection is read by a callback of its own, and hundreds of them may have news at once: after a pause, or
when an ingress is new. One turn would then take in all of it, while every stream waits.
"""

from __future__ import annotations

import asyncio

TURN_BLOCKS = 8192
"""Blocks after which the rest waits for the event loop's next turn: about 10 ms. The last message may exceed it.
"""


class TurnBudget:
    """Counts the blocks that were taken in since the event loop's last turn. Lives on one event loop."""

    def __init__(self) -> None:
        self._num_blocks = 0

    @property
    def is_spent(self) -> bool:
        """Whether all else has to wait for the next turn."""
        return self._num_blocks >= TURN_BLOCKS

    def spend(self, num_blocks: int) -> None:
        """Note that so many blocks were taken in."""
        if num_blocks and not self._num_blocks:
            # What waits for the next turn is called after this, as it is put off later.
            asyncio.get_running_loop().call_soon(self._renew)
        self._num_blocks += num_blocks

    def _renew(self) -> None:
        self._num_blocks = 0
