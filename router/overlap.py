"""How much of a prompt each replica holds: a mapping by name of which only the part that is read is computed.

A prompt's beginning may be held by every replica, and the rest by few. So replicas are kept in groups of those
that hold equally much, each a mask with one bit for each replica's slot:

    slot 0 holds 4 blocks, slot 1 holds 2, slots 2 and 3 hold 3   ──▶   levels  (4, 0001) (3, 1100) (2, 0010)

A policy asks for the deepest levels and for some replicas by name. Where each replica of a large fleet holds a
different depth, finding all of them would take longer than the rest of a placement.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, overload

from router.lower_tiers import Below

_T = TypeVar("_T")
Level = tuple[int, int]
"""A number of tokens or blocks, above 0, and a mask of the slots of the replicas that hold so many."""
_MAX_SCANNED = 8
"""Levels that a lookup by name reads before it bisects for the replica's own."""


class Levels(Iterable[Level]):
    """Levels without a slot in common, the deepest first. Each is computed on demand."""

    __slots__ = ("_depth", "_found", "_rest")

    def __init__(self, levels: Iterable[Level], depth: Callable[[int], int] | None = None) -> None:
        """`depth` returns how much a slot holds without reading the levels."""
        self._found: list[Level] = []
        self._rest = iter(levels)
        self._depth = depth

    def __iter__(self) -> Iterator[Level]:
        at = 0
        while (level := self._at(at)) is not None:
            yield level
            at += 1

    def _at(self, number: int) -> Level | None:
        """Return a level, None if there are no more. The caller must have read all levels before it."""
        if number == len(self._found):
            level = next(self._rest, None)
            if level is None:
                return None
            self._found.append(level)
        return self._found[number]

    @property
    def deepest(self) -> int:
        """The depth of the first level; 0 if there is none."""
        level = self._at(0)
        return 0 if level is None else level[0]

    def depth_of(self, slot: int) -> int:
        """Return how much a slot holds."""
        number = 0
        while (level := self._at(number)) is not None:
            depth, mask = level
            if mask >> slot & 1:
                return depth
            if number == _MAX_SCANNED and self._depth is not None:
                return self._depth(slot)
            number += 1
        return 0


class Overlap(Mapping[str, int]):
    """Leading tokens (or blocks) of one prompt by replica; replicas that hold none are omitted.

    The index that made it computes it on demand, and only until the index changes: to keep it, copy it
    with `dict`. Reading raises `OutdatedOverlap` afterwards.
    """

    __slots__ = ("_below", "_names", "_slots", "_unit", "levels")

    def __init__(
        self,
        levels: Levels,
        slots: Mapping[str, int],
        names: Sequence[str],
        unit: int = 1,
        below: Callable[[str, int], Below] | None = None,
    ) -> None:
        """`unit` multiplies the levels' depth. `slots` and `names`, which is by slot, never change, though the
        index does. `below` returns the part of a replica's depth that is below its device.
        """
        self.levels = levels
        self._below = below
        self._slots, self._names, self._unit = slots, names, unit

    @classmethod
    def of(cls, held: Mapping[str, int]) -> Overlap:
        """Return `held` unchanged if an index made it, else group its replicas."""
        if isinstance(held, cls):
            return held
        names = [name for name, length in held.items() if length]
        masks: dict[int, int] = {}
        for slot, name in enumerate(names):
            masks[held[name]] = masks.get(held[name], 0) | 1 << slot
        levels = Levels(sorted(masks.items(), reverse=True))
        return cls(levels, {name: slot for slot, name in enumerate(names)}, names)

    def times(self, factor: int) -> Overlap:
        """Return the same in another unit, such as tokens for blocks."""
        return Overlap(self.levels, self._slots, self._names, self._unit * factor, self._below)

    def below(self, replica: str) -> Below:
        """Return the part of a replica's depth in each tier below its device; () where all is on the device."""
        slot = self._slots.get(replica) if self._below is not None else None
        if slot is None or self._below is None:
            return ()
        return tuple(blocks * self._unit for blocks in self._below(replica, self.levels.depth_of(slot)))

    @property
    def has_lower(self) -> bool:
        """Whether any replica may hold something below its device."""
        return self._below is not None

    @property
    def most(self) -> int:
        """The most that any replica holds; 0 if none holds anything."""
        return self.levels.deepest * self._unit

    def most_among(self, replicas: Container[str]) -> int:
        """Return the most that one of `replicas` holds. O(other replicas that hold as much or more)."""
        for depth, mask in self.levels:
            if any(name in replicas for name in self.names(mask)):
                return depth * self._unit
        return 0

    def names(self, mask: int) -> Iterator[str]:
        """Return the replicas of a level's mask."""
        if not mask & (mask - 1):  # One replica is by far the most frequent case.
            return iter((self._names[mask.bit_length() - 1],))
        return map(self._names.__getitem__, bits(mask))

    def is_in(self, mask: int, name: str) -> bool:
        """Return whether a replica is in a level's mask."""
        slot = self._slots.get(name)
        return slot is not None and bool(mask >> slot & 1)

    @overload
    def get(self, key: str, /) -> int | None: ...
    @overload
    def get(self, key: str, /, default: int | _T) -> int | _T: ...
    def get(self, key: str, /, default: int | _T | None = None) -> int | _T | None:
        """Return how much a replica holds, or `default`."""
        slot = self._slots.get(key)
        depth = 0 if slot is None else self.levels.depth_of(slot)
        return depth * self._unit if depth else default

    def __getitem__(self, key: str) -> int:
        held = self.get(key)
        if held is None:
            raise KeyError(key)
        return held

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return (name for _, mask in self.levels for name in self.names(mask))

    def __len__(self) -> int:
        return sum(mask.bit_count() for _, mask in self.levels)

    def __repr__(self) -> str:
        return f"Overlap({dict(self)!r})"


class OutdatedOverlap(RuntimeError):
    """An overlap was read after its index had changed."""


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the set bits, lowest first."""
    digits = bin(mask)[:1:-1]
    position = digits.find("1")
    while position >= 0:
        yield position
        position = digits.find("1", position + 1)
