"""Ranks as threads of the test's process: they compute and report as processes do, but start sooner."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from engine.parallel.rank_network import ONE_MACHINE
from engine.ranks.launcher import RankSpec
from engine.ranks.worker import work


class Threads:
    """Launches ranks as threads. On a machine with GPUs each thread takes its own."""

    shares_gpus = True
    network = ONE_MACHINE

    def launch(self, specs: Sequence[RankSpec]) -> RankThreads:
        """Start a thread for each spec."""
        return RankThreads(specs)


class RankThreads:
    """Ranks as threads, which end with their connections."""

    def __init__(self, specs: Sequence[RankSpec]) -> None:
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._work, args=(spec,), daemon=True) for spec in specs]
        for thread in self._threads:
            thread.start()

    def ended(self) -> str | None:
        """Return what a rank raised; None if none has failed."""
        return self.errors[0] if self.errors else None

    def close(self) -> None:
        """Wait for the threads to end."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank outlives its connection"

    def _work(self, spec: RankSpec) -> None:
        try:
            work(spec, leave=lambda: None)
        except Exception as error:
            self.errors.append(f"rank {spec.rank}: {error!r}")
