"""How much of a prompt each replica holds: a mapping by name that is not made before somebody reads all of it.

A prompt's beginning may be held by every replica, and what comes after it by few. So replicas are kept in groups
of those that hold equally much, each a mask with one bit for each replica's slot:

    slot 0 holds 4 blocks, slot 1 holds 2, slots 2 and 3 hold 3   ──▶   levels  (4, 0001) (3, 1100) (2, 0010)
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TypeVar, overload

_T = TypeVar("_T")
Level = tuple[int, int]
"""How much some replicas hold, above 0 and in units of the overlap, and a mask with the bits of their slots."""
_MAX_SCANNED = 8
"""With more levels than this, lookups by name go to a dictionary."""


class Overlap(Mapping[str, int]):
    """Leading tokens (or blocks) of one prompt by replica; who holds none is left out. Never changes."""

    __slots__ = ("_by_name", "_names", "_slots", "_unit", "levels")

    def __init__(
        self, levels: Sequence[Level], slots: Mapping[str, int], names: Sequence[str], unit: int = 1
    ) -> None:
        """`levels` have no slot in common, the deepest comes first; `unit` is what their depth is multiplied by.
        `slots` and `names`, which is by slot, never change, either.
        """
        self.levels = levels
        self._slots, self._names, self._unit = slots, names, unit
        self._by_name: dict[str, int] | None = None

    @classmethod
    def of(cls, held: Mapping[str, int]) -> Overlap:
        """Return `held` as it is if an index has made it, else group its replicas."""
        if isinstance(held, cls):
            return held
        names = [name for name, length in held.items() if length]
        masks: dict[int, int] = {}
        for slot, name in enumerate(names):
            masks[held[name]] = masks.get(held[name], 0) | 1 << slot
        levels = sorted(masks.items(), reverse=True)
        return cls(levels, {name: slot for slot, name in enumerate(names)}, names)

    def times(self, factor: int) -> Overlap:
        """Return the same in another unit, such as tokens for blocks."""
        return Overlap(self.levels, self._slots, self._names, self._unit * factor)

    @property
    def most(self) -> int:
        """The most that any replica holds; 0 if none holds anything."""
        return self.levels[0][0] * self._unit if self.levels else 0

    def most_among(self, replicas: Container[str]) -> int:
        """Return the most that one of `replicas` holds. O(other replicas that hold as much or more)."""
        for depth, mask in self.levels:
            if any(name in replicas for name in self.names(mask)):
                return depth * self._unit
        return 0

    def names(self, mask: int) -> Iterator[str]:
        """Return the replicas of a level's mask."""
        if not mask & (mask - 1):  # one, by far the most frequent
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
        if len(self.levels) > _MAX_SCANNED:
            return self._all().get(key, default)
        slot = self._slots.get(key)
        if slot is not None:
            for depth, mask in self.levels:
                if mask >> slot & 1:
                    return depth * self._unit
        return default

    def __getitem__(self, key: str) -> int:
        held = self.get(key)
        if held is None:
            raise KeyError(key)
        return held

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return sum(mask.bit_count() for _, mask in self.levels)

    def __repr__(self) -> str:
        return f"Overlap({self._all()!r})"

    def _all(self) -> dict[str, int]:
        if self._by_name is None:
            unit = self._unit
            self._by_name = {name: depth * unit for depth, mask in self.levels for name in self.names(mask)}
        return self._by_name


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the set bits, lowest first."""
    digits = bin(mask)[:1:-1]
    position = digits.find("1")
    while position >= 0:
        yield position
        position = digits.find("1", position + 1)
