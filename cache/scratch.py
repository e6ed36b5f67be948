"""Memory that a step may overwrite because it holds nothing: one page, as each of the pages of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cache.resume.lease_state import StateStep


class ScratchRows(NamedTuple):
    """A page table of layers with a window, of the same page everywhere (as `LeaseWindow`)."""

    rows: Sequence[tuple[int, ...]]
    first: int = 0


class Scratch(NamedTuple):
    """A page, and a slot for a recurrent state where the model has one. Rows of a step may share both: what they
    write there is of no use to anybody.
    """

    page: int
    slot: int | None
    num_groups: int
    """Groups of layers with a window that have pages of their own."""

    def pages(self, num_pages: int) -> list[int]:
        """Return a page table."""
        return [self.page] * num_pages

    def window(self, num_pages: int) -> ScratchRows | None:
        """Return the page table of layers with a window; None where they have none of their own."""
        return ScratchRows([(self.page,) * self.num_groups] * num_pages) if self.num_groups else None

    def state(self, start: int) -> StateStep | None:
        """Return how a chunk that begins at `start` uses the slot; None in a model without recurrent states."""
        return None if self.slot is None else StateStep(self.slot if start else None, self.slot, 0, ())
