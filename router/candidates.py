"""A fleet's replicas at one moment, as a policy receives them, and an order of them that is completed on demand.

A fleet keeps its candidates ready between heartbeats, so a prompt costs one copy of a dictionary. A policy that
compares a few of them looks these up by name; one that is written for any sequence of candidates sees a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import overload

from router.cost import Candidate
from router.rendezvous import HashedNames, RendezvousOrder


class Candidates(list[Candidate]):
    """All replicas, those that can serve first, with sums that policies would else compute for every prompt."""

    __slots__ = ("_hashed", "none_available", "num_running", "serving", "unavailable")

    def __init__(
        self,
        serving: Mapping[str, Candidate],
        unavailable: Sequence[Candidate] = (),
        num_running: int | None = None,
        hashed: HashedNames | None = None,
    ) -> None:
        """`num_running` counts the requests at those that can serve, and `hashed` has their names, where the
        caller knows them.
        """
        super().__init__(serving.values())
        self.extend(unavailable)
        self.none_available = not serving
        if self.none_available:  # then any of them may be chosen
            serving, unavailable = {one.replica: one for one in unavailable}, ()
            num_running = hashed = None
        self.serving = serving
        """Those to choose among, by name: all when none is available; empty only when there are no replicas."""
        self.unavailable = unavailable
        """Those to try last; empty when none is available."""
        if num_running is None:
            num_running = sum(candidate.num_running for candidate in serving.values())
        self.num_running: int = num_running
        """Requests running or waiting at those of `serving`."""
        self._hashed = hashed

    @property
    def hashed(self) -> HashedNames:
        """The names of `serving`."""
        if self._hashed is None:
            self._hashed = HashedNames(self.serving)
        return self._hashed

    def rendezvous(self, key: int) -> RendezvousOrder:
        """Return `serving` by rendezvous hashing for a key."""
        return RendezvousOrder(key, self.hashed)

    @classmethod
    def of(cls, replicas: Iterable[Candidate]) -> Candidates:
        """Return `replicas` unchanged if a fleet made them, else gather them."""
        if isinstance(replicas, cls):
            return replicas
        serving: dict[str, Candidate] = {}
        unavailable: list[Candidate] = []
        for candidate in replicas:
            if candidate.is_available:
                serving[candidate.replica] = candidate
            else:
                unavailable.append(candidate)
        return cls(serving, unavailable)


class Order(Sequence[str]):
    """Names of replicas, best first: a few known ones, then the rest, which is put in order on demand.

    Most prompts need only the first two names. Equal to any sequence of the same names.
    """

    __slots__ = ("_known", "_length", "_rest")

    def __init__(self, known: Sequence[str], num_rest: int, rest: Callable[[], Iterable[str]]) -> None:
        """`rest` returns the `num_rest` names after those that are `known`; it is called at most one time."""
        self._known = tuple(known)
        self._length = len(self._known) + num_rest
        self._rest = rest

    def followed_by(self, last: Sequence[str]) -> Order:
        """Return this order with `last` at its end."""
        num_known = len(self._known)
        return Order(self._known, self._length - num_known + len(last), lambda: (*self._all()[num_known:], *last))

    def _all(self) -> tuple[str, ...]:
        if len(self._known) < self._length:
            self._known = (*self._known, *self._rest())
        return self._known

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, int) and 0 <= index < len(self._known):
            return self._known[index]
        return self._all()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return f"Order{self._all()!r}"
