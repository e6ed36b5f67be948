"""The recurrent state of a running request: in which slot it is, and what the next chunk does with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cache.node import Node
from cache.resume.snapshots import Snapshots


class StateStep(NamedTuple):
    """Slots that a chunk reads and writes."""

    source: int | None
    """Slot with the state before the chunk, or before the tokens that it lacks; None: before a text."""
    target: int
    """Slot for the state after it."""
    num_missing: int
    """Tokens before the chunk that `source` lacks."""
    borders: tuple[tuple[int, int], ...]
    """Positions within the chunk at which the state is kept as well, and the slots for it."""


class LeaseState:
    """The state of one lease. Slots are written by steps in the order in which they were planned, so all this is
    known before they run.
    """

    def __init__(self, snapshots: Snapshots, slot: int, origin: Node | None) -> None:
        """The lease owns `slot` and resumes from the snapshot of `origin`; None: it starts from no state."""
        self._snapshots, self._slot = snapshots, slot
        self.origin = origin
        """The node whose snapshot is pinned until the first chunk is computed."""
        self._source = None if origin is None else snapshots.pin(origin)
        self.end = 0 if origin is None else origin.end
        """Tokens that the state contains when the steps planned so far are done."""
        self.kept: list[tuple[int, int]] = []
        """Positions at which states are kept that are not snapshots yet, and their slots."""
        self.is_awaited = False
        """Whether its first chunk begins with a state that is to be in its slot before it (`await_at`)."""

    @classmethod
    def begin(cls, snapshots: Snapshots, origin: Node | None) -> LeaseState | None:
        """Return the state of a new lease; None if there is no slot for it."""
        if origin is not None:
            snapshots.pin(origin)  # so that `take` does not evict it
        slot = snapshots.take()
        state = None if slot is None else cls(snapshots, slot, origin)
        if origin is not None:
            snapshots.unpin(origin)
        return state

    def await_at(self, num_tokens: int) -> None:
        """Resume after so many tokens, from a state that is copied to its slot before the first chunk."""
        assert self.origin is None
        self._source, self.end, self.is_awaited = self._slot, num_tokens, True

    @property
    def slot(self) -> int | None:
        """The slot with the state after `end` tokens; None while that is not its own, or not there yet."""
        return None if self.is_awaited or self._source != self._slot else self._slot

    @property
    def awaited_slot(self) -> int:
        """The slot to which a state will be copied."""
        assert self.is_awaited
        return self._slot

    def plan(self, start: int, end: int, borders: Sequence[int], *, has_drafts: bool) -> StateStep:
        """Plan a chunk of the tokens `start` to `end`, and keep the state at `borders` (start <= border < end),
        ascending, while there are slots. With draft tokens after its first, the state does not advance by the
        chunk: it is not known yet by how much.
        """
        source, inside = self._source, []
        self.is_awaited = False
        for border in borders:
            is_here = border == start == self.end
            if is_here and source != self._slot:
                continue  # The snapshot from which it resumes is at this border.
            slot = self._snapshots.take()
            if slot is None:
                continue
            if is_here:
                self.kept.append((border, self._slot))
                self._slot = slot
            else:
                self.kept.append((border, slot))
                inside.append((border, slot))
        step = StateStep(source, self._slot, start - self.end, tuple(inside))
        self._source, self.end = self._slot, start if has_drafts else end
        return step

    def release_origin(self) -> None:
        """Note that the first chunk is computed. Idempotent."""
        if self.origin is not None:
            self._snapshots.unpin(self.origin)
            self.origin = None

    def keeps_between(self, first: int, last: int) -> bool:
        """Whether a state is kept after `first`, up to `last`, that is no snapshot yet."""
        return any(first < position <= last for position, _ in self.kept)

    def take_kept(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return positions and slots of kept states that are computed, as `num_tokens` tokens are; they are the
        caller's from now on.
        """
        done = [place for place in self.kept if place[0] <= num_tokens]
        if done:
            self.kept = [place for place in self.kept if place[0] > num_tokens]
        return done

    def end_at(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return what `take_kept` does, with the state itself if it contains no more than these tokens. All other
        slots are free now.
        """
        self.release_origin()
        done = self.take_kept(num_tokens)
        if self.slot is not None and 0 < self.end <= num_tokens:
            done.append((self.end, self.slot))
        else:
            self._snapshots.free(self._slot)
        for _, slot in self.kept:
            self._snapshots.free(slot)
        self.kept = []
        return done
