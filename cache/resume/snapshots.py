"""Slots for the states of recurrent layers: which are free, and which hold the state at the end of a node.

What attention keeps of a prefix is found page by page. A recurrent layer keeps one state of constant size, which
only leads on from where it was taken: a prefix can be reused up to the deepest node that has a *snapshot*.

    root ─ [ system prompt | slot 3 ] ─┬─ [ question | slot 7 ] ─ [ answer | slot 1 ]
                                       └─ [ another question ]                            reusable up to slot 3

A running request has a slot of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from cache.page_pool import PagePool
from cache.resume.resume_points import ResumePoints


class StateAccount(NamedTuple):
    """Slots by state. Every slot is in exactly one, so `total` is their number at all times."""

    free: int
    evictable: int
    """Snapshots that may be given up for others."""
    locked: int
    """Snapshots that a request is about to read, and those of prefixes that all namespaces share."""
    private: int
    """Slots of running requests, with states that are about to become snapshots."""

    @property
    def total(self) -> int:
        """Sum over all states, in slots."""
        return sum(self)


class Snapshots(ResumePoints):
    """Owns the slots, which are the states that nodes carry."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self._pool = PagePool(num_slots)
        self._num_private = 0

    def account(self) -> StateAccount:
        """Count the slots in each state. O(1)."""
        return StateAccount(self._pool.num_free, len(self._idle), len(self.pins), self._num_private)

    def take(self) -> int | None:
        """Take a slot, if need be that of the least recently used snapshot; None if all are needed. O(1)."""
        if not self._pool.num_free:
            if not self._idle:
                return None
            self.give_up(next(iter(self._idle)))
        self._num_private += 1
        return self._pool.allocate(1)[0]

    def free(self, slot: int) -> None:
        """Give a slot back that was taken."""
        self._num_private -= 1
        self._pool.free([slot])

    def _carried(self, slot: int) -> None:
        self._num_private -= 1

    def _dropped(self, slot: int) -> None:
        self._pool.free([slot])
