"""The candidates of a fleet, kept ready from change to change, with the sums that placement needs.

A prompt considers every replica, and the time for it must not grow with their number more than a copy of a
dictionary does. So a replica's candidate is made when its state changes, which affects no other one. Sums are of
whole millionths: they stay exact, where sums of floats that are added and subtracted for days would drift.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from msgspec.structs import replace

from router.candidates import Candidates
from router.cost import Candidate, queue_seconds
from router.rendezvous import HashedNames

DEFAULT_PREFILL_RATE = 5_000.0
"""Tokens/s of a replica while none in the fleet has measured its own."""
_SCALE = 1e6


class ExactMean:
    """Mean of values that are added and removed. O(1) for each; exact to a millionth however many there were."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._sum = 0

    def put(self, name: str, value: float | None) -> None:
        """Set the value of `name`; None removes it."""
        self._sum -= self._values.pop(name, 0)
        if value is not None:
            self._values[name] = scaled = round(value * _SCALE)
            self._sum += scaled

    def get(self, default: float) -> float:
        """Return the mean, or `default` when there are no values."""
        return self._sum / len(self._values) / _SCALE if self._values else default


class ReadyCandidates:
    """The candidates of all replicas of a fleet. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._serving: dict[str, Candidate] = {}
        self._unavailable: dict[str, Candidate] = {}
        self._waits: dict[str, float] = {}
        """Seconds until a new request would start, for each replica of `_serving`."""
        self._num_running = 0  # requests at the replicas of `_serving`
        self._total_rate = 0  # sum over `_serving`, in millionths of tokens/s
        self._rates, self._shares = ExactMean(), ExactMean()
        self._hashed: HashedNames | None = None
        """The names of `_serving`; None when they have changed since the last prompt."""

    def put(self, candidate: Candidate, prefill_share: float | None) -> None:
        """Add a replica's candidate, or replace it. O(1).

        A `prefill_rate` of 0 has not been measured yet: the present mean of all others counts instead, until the
        replica's candidate is put again, which is with its next heartbeat. The share counts for the utilisation of
        the fleet, unless it is None.
        """
        name = candidate.replica
        is_measured = candidate.prefill_rate > 0.0
        self._rates.put(name, candidate.prefill_rate if is_measured else None)
        self._shares.put(name, prefill_share)
        self._store(candidate if is_measured else replace(candidate, prefill_rate=self.typical_rate()))

    def remove(self, name: str) -> None:
        """Remove a replica that no longer exists."""
        self._rates.put(name, None)
        self._shares.put(name, None)
        self._take_out(name)

    def of(self, names: Collection[str], avoid: Collection[str] = ()) -> Candidates:
        """Return the candidates of `names`; those to `avoid` are unavailable. An unknown name counts as an idle
        replica.
        """
        wanted: Set[str] = names if isinstance(names, Set) else dict.fromkeys(names).keys()
        if not avoid and len(wanted) >= len(self._serving) and self._serving.keys() <= wanted:
            last = [candidate for name, candidate in self._unavailable.items() if name in wanted]
            if len(self._serving) + len(last) == len(wanted):
                return Candidates(self._serving.copy(), last, self._num_running, self._hashed_names())
        return Candidates.of([self._one(name, name in avoid) for name in wanted])

    def shortest_queue(self) -> tuple[float, float] | None:
        """Return the shortest wait of those that can serve, in seconds, and the sum of their prefill rates; None
        when none can.
        """
        if not self._serving:
            return None
        return min(self._waits.values()), self._total_rate / _SCALE

    def utilisation(self) -> float:
        """Return the mean share of prefill."""
        return self._shares.get(0.0)

    def _one(self, name: str, is_avoided: bool) -> Candidate:
        candidate = self._serving.get(name) or self._unavailable.get(name)
        if candidate is None:
            candidate = Candidate(name, 0.0, 0, 0, 0, 0.0, self.typical_rate(), 0.0, is_available=True)
        return replace(candidate, is_available=False) if is_avoided else candidate

    def _store(self, candidate: Candidate) -> None:
        name = candidate.replica
        if candidate.is_available and (before := self._serving.get(name)) is not None:  # it keeps its position
            self._count(before, -1)
        else:
            self._take_out(name)
        if candidate.is_available:
            if name not in self._serving:
                self._hashed = None
            self._serving[name] = candidate
            self._waits[name] = queue_seconds(candidate)
            self._count(candidate, 1)
        else:
            self._unavailable[name] = candidate

    def _take_out(self, name: str) -> None:
        self._unavailable.pop(name, None)
        before = self._serving.pop(name, None)
        if before is not None:
            del self._waits[name]
            self._count(before, -1)
            self._hashed = None

    def _count(self, candidate: Candidate, sign: int) -> None:
        self._num_running += sign * candidate.num_running
        self._total_rate += sign * round(candidate.prefill_rate * _SCALE)

    def typical_rate(self) -> float:
        """Return the mean prefill rate, in tokens/s."""
        return self._rates.get(DEFAULT_PREFILL_RATE)

    def _hashed_names(self) -> HashedNames:
        if self._hashed is None:
            self._hashed = HashedNames(self._serving)
        return self._hashed
