"""The replicas that Serve starts and stops: each boots, serves, drains, and costs money throughout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from deployments.simulator.fleet.fleet import SimulatedFleet


@dataclass(slots=True, eq=False)
class _Life:
    """A replica from the decision to start it to its end, in seconds."""

    began: float
    index: int | None = None
    """Its number in the fleet; None while it boots."""
    is_stopping: bool = False
    ended: float | None = None


class ReplicaSet:
    """Keeps as many replicas as the last target says."""

    def __init__(self, fleet: SimulatedFleet, num_initial: int, boot_s: float) -> None:
        """The fleet has `num_initial` replicas that serve."""
        self._fleet, self._boot_s = fleet, boot_s
        self._lives = [_Life(0.0, index) for index in range(num_initial)]

    @property
    def running(self) -> list[int]:
        """Numbers of the replicas that accept requests, in the order of their starts."""
        return [life.index for life in self._lives if life.index is not None and not life.is_stopping]

    @property
    def is_idle(self) -> bool:
        """Whether no replica has a request."""
        return all(self._is_idle(life) for life in self._lives)

    def scale(self, target: int, now: float) -> None:
        """Start missing replicas, or stop surplus ones: booting ones first, then the newest."""
        kept = [life for life in self._lives if not life.is_stopping]
        for _ in range(target - len(kept)):
            life = _Life(now)
            self._lives.append(life)
            self._fleet.at(now + self._boot_s, partial(self._boot, life))
        kept.sort(key=lambda life: life.index is None)
        for life in kept[target:]:
            life.is_stopping = True
            if life.index is not None:
                self._fleet.drain(life.index)
        self.settle(now)

    def settle(self, now: float) -> None:
        """End the replicas that are stopping and have no request left."""
        for life in self._lives:
            if life.is_stopping and life.ended is None and self._is_idle(life):
                life.ended = now
                if life.index is not None:
                    self._fleet.leave(life.index)

    def seconds(self, end: float) -> float:
        """Return the seconds of all replicas together from their beginnings to their ends, or to `end`."""
        ends = ((life, end if life.ended is None else min(life.ended, end)) for life in self._lives)
        return sum(max(0.0, until - life.began) for life, until in ends)

    def _boot(self, life: _Life, now: float) -> None:
        if not life.is_stopping:
            life.index = self._fleet.join(now)

    def _is_idle(self, life: _Life) -> bool:
        return life.index is None or self._fleet.replica(life.index).is_idle
