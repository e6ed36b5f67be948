"""Links that transfers share: each transfer gets an equal part of every link that it crosses.

    rate of a transfer = least, over its links, of bandwidth / transfers on it

So a link never moves more than its bandwidth. Bandwidth that a transfer's slowest link leaves unused on its other
links is not redistributed, as it would be in real networks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Done = Callable[[float, bool], None]
"""Called with the time, and whether all bytes have arrived."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way."""

    links: Sequence[str]
    left: float
    """Bytes that have not arrived."""
    starts: float
    """When its first byte moves."""
    done: Done = field(repr=False)
    rate: float = 0.0
    """Bytes/s; 0 before it starts."""
    ends: float = math.inf


class Links:
    """All transfers of a fleet, on the caller's clock: `next_event` is the time of the next change."""

    def __init__(self) -> None:
        self.moved: dict[str, float] = {}
        """Bytes that each link has moved."""
        self._bandwidth: dict[str, float] = {}
        self._transfers: list[Transfer] = []
        self._at = 0.0

    def add(self, link: str, bandwidth: float) -> None:
        """Add a link, in bytes/s. Raises ValueError for a bandwidth that is not above 0."""
        if not bandwidth > 0.0:
            raise ValueError(f"the bandwidth of {link} must be above 0 bytes/s, got {bandwidth}")
        self._bandwidth[link] = bandwidth
        self.moved.setdefault(link, 0.0)

    def start(self, links: Sequence[str], num_bytes: float, now: float, latency: float, done: Done) -> None:
        """Begin a transfer over all of `links`, whose first byte moves after `latency` seconds."""
        self._move(now)
        self._transfers.append(Transfer(links, num_bytes, now + latency, done))
        self._share(now)

    def count(self, link: str) -> int:
        """Count the transfers on a link, including those whose first byte has not moved."""
        return sum(link in transfer.links for transfer in self._transfers)

    def next_event(self) -> float:
        """Return when the next transfer starts or ends; infinity if there is none."""
        return min((t.ends if t.rate else t.starts for t in self._transfers), default=math.inf)

    def advance(self, now: float) -> None:
        """Start and end the transfers that are due."""
        self._move(now)
        self._end([transfer for transfer in self._transfers if transfer.rate and transfer.ends <= now], now, True)

    def cut(self, link: str, now: float) -> None:
        """End all transfers on a link before they have arrived."""
        self._move(now)
        self._end([transfer for transfer in self._transfers if link in transfer.links], now, False)

    def _end(self, ended: Sequence[Transfer], now: float, arrived: bool) -> None:
        self._transfers = [transfer for transfer in self._transfers if transfer not in ended]
        self._share(now)
        for transfer in ended:
            transfer.done(now, arrived)

    def _move(self, now: float) -> None:
        """Account for the bytes moved since the last change."""
        passed, self._at = now - self._at, now
        for transfer in self._transfers:
            if transfer.rate:
                moved = min(transfer.rate * passed, transfer.left)
                transfer.left -= moved
                for link in transfer.links:
                    self.moved[link] += moved

    def _share(self, now: float) -> None:
        """Assign each transfer its share of the links."""
        active = [transfer for transfer in self._transfers if transfer.starts <= now]
        users = Counter(link for transfer in active for link in transfer.links)
        for transfer in active:
            transfer.rate = min(self._bandwidth[link] / users[link] for link in transfer.links)
            transfer.ends = now + transfer.left / transfer.rate
