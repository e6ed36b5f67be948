"""Test the scheduler and the cache under random combinations of events, for as long as you like.

    python -m benchmarks.soak [--seconds 600] [--seed N] [--json FILE]
    python -m benchmarks.soak --seed N --episode M          repeat one episode

It needs no model and no device: the tests' runner keeps token and position in each KV slot, and samples a hash of
the slots that the page tables refer to, so that a page shared, copied, swapped or freed wrongly gives a wrong
token. Each episode draws an engine (memory, page size, limits, policy, preemption, overlap, ...) and clients that
come and go, share prefixes and resume, while steps fail and another engine borrows pages. On every step the pages
must add up; every client must be sent what an engine of its own would send; at the end nothing may be held. After
a violation the program exits with 1 and prints the command to repeat it. Time per step is that of the scheduler
and the cache alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import platform
import random
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.soak_episode import Episode

STEPS = 150
"""Steps of an episode in which clients arrive. As many again may follow until all are served."""
REPORT_S = 30.0
HANG_S = 300.0
"""An episode takes a tenth of a second."""


class Soak:
    """Runs episodes one after the other, and counts what happens in all of them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts = Counter[str]()
        self.scheduler_seconds = 0.0

    def run(self, number: int) -> str | None:
        """Run one episode; returns what was wrong, or None."""
        episode = Episode(f"{self.seed}.{number}")
        again = f"Again with:\n    python -m benchmarks.soak --seed {self.seed} --episode {number}"
        watchdog = threading.Timer(HANG_S, _give_up, [f"The episode does not end. {again}"])
        watchdog.start()
        try:
            episode.run(STEPS)
        except Exception:  # after any failure, print how to repeat it
            told = f"{traceback.format_exc()}\nengine: {episode.options}\n{episode.weather}"
            return f"{told}\nafter {episode.counts['steps']} steps. {again}"
        finally:
            watchdog.cancel()
        self.counts.update(episode.counts)
        self.counts["episodes"] += 1
        self.scheduler_seconds += episode.scheduler_seconds
        return None

    def summary(self) -> dict[str, Any]:
        steps = max(self.counts["steps"], 1)
        return {
            "seed": self.seed,
            "counts": dict(sorted(self.counts.items())),
            "scheduler_us_per_step": round(1e6 * self.scheduler_seconds / steps, 1),
            "requests_per_step": round(self.counts["chunks"] / steps, 2),
            "scheduler_steps_per_second": round(steps / max(self.scheduler_seconds, 1e-9)),
            "python": platform.python_version(),
            "machine": platform.machine(),
        }


def main() -> int:
    options = _options()
    logging.getLogger("engine.program.loop").setLevel(logging.CRITICAL)  # steps fail on purpose
    soak = Soak(options.seed)
    began = reported = time.monotonic()
    number = options.episode or 0
    while options.episode is None or number == options.episode:
        wrong = soak.run(number)
        if wrong is not None:
            print(wrong, file=sys.stderr)
            return 1
        number += 1
        now = time.monotonic()
        if options.episode is None and now - began >= options.seconds:
            break
        if now - reported >= REPORT_S:
            reported = now
            print(f"{now - began:6.0f} s  {number} episodes, {soak.counts['steps']} steps, all well", flush=True)
    summary = soak.summary() | {"seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(summary, indent=2))
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0


def _give_up(message: str) -> None:
    """Exit at once, as a step that never returns cannot be interrupted."""
    print(message, file=sys.stderr, flush=True)
    faulthandler.dump_traceback()
    os._exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="time after which no episode begins")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="seed (default: random)")
    parser.add_argument("--episode", type=int, help="run only this episode")
    parser.add_argument("--json", type=Path, help="write the summary here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
