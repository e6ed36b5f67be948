"""Ranks as threads of the test's process: what they compute and say is real, they only start sooner."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from engine.ranks.launcher import Seat
from engine.ranks.worker import work


class Threads:
    """A launcher. On a machine with GPUs each thread takes its own."""

    shares_gpus = True

    def launch(self, seats: Sequence[Seat]) -> RankThreads:
        """A thread for each seat."""
        return RankThreads(seats)


class RankThreads:
    """They end with their connections."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._work, args=(seat,), daemon=True) for seat in seats]
        for thread in self._threads:
            thread.start()

    def ended(self) -> str | None:
        """What a rank raised."""
        return self.errors[0] if self.errors else None

    def close(self) -> None:
        """Wait for their end."""
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "a rank outlives its connection"

    def _work(self, seat: Seat) -> None:
        try:
            work(seat, leave=lambda: None)
        except Exception as error:
            self.errors.append(f"rank {seat.rank}: {error!r}")
