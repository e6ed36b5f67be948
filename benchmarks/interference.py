"""Measure what prompts cost running streams and each other: inter-token latency and time to first token.

    python -m benchmarks.interference [--json benchmarks/results/interference.json]

The embedded model runs in real time with several settings side by side: all engines are loaded at once and take
turns, so that other work on the machine affects all of them alike.

- Streams decode alone, and beside long prompts that follow each other without a pause: with the default settings
  (`max_step_stretch`), with steps bound by `max_step_ms` alone, and with steps bound by tokens alone.
- Prompts of 2,000, 50 and 100 tokens arrive at once: with steps of 256 tokens, and one whole prompt at a time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta

LONG_PROMPT = 3500
PROMPTS = {"long": 2000, "small": 50, "medium": 100}


class Watched:
    """A running engine that records when tokens arrive."""

    def __init__(self, **settings: Any) -> None:
        self.engine = Engine.from_config(
            EngineConfig(model="demo", kv_pages=2048, prefix_cache=False, threads=1, **settings)
        )
        self.times: dict[str, list[float]] = defaultdict(list)
        self._running: set[str] = set()
        self._changed = threading.Condition()
        self._ids = count()
        self.engine.loop.start(self._note)

    def _note(self, events: list[StreamDelta]) -> None:
        now = time.perf_counter()
        with self._changed:
            for event in events:
                self.times[event.request_id] += [now] * len(event.token_ids)
                if event.finish_reason:
                    self._running.discard(event.request_id)
            self._changed.notify_all()

    def submit(self, num_prompt: int, max_tokens: int = 1) -> str:
        """Submit a request with unique content."""
        number = next(self._ids)
        name, size = f"r{number}", self.engine.model.vocab_size
        ids = [3 + (number * 7919 + i * 31) % (size - 3) for i in range(num_prompt)]
        with self._changed:
            self._running.add(name)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.loop.submit(self.engine.new_request(name, ids, params))
        return name

    def wait(self, names: Iterable[str], num_tokens: int | None = None) -> None:
        """Wait until the requests have ended, or have so many tokens."""
        with self._changed:
            for name in names:
                if num_tokens is None:
                    self._changed.wait_for(lambda: name not in self._running)  # noqa: B023
                else:
                    self._changed.wait_for(lambda: len(self.times[name]) >= num_tokens)  # noqa: B023

    def abort(self, names: Iterable[str]) -> None:
        """End requests."""
        for name in names:
            self.engine.loop.abort(name)
        self.wait(names)

    def stop(self) -> None:
        """End the engine's thread."""
        self.engine.loop.stop()


def stream_gaps(watched: Watched, options: argparse.Namespace, *, has_long: bool) -> tuple[list[float], float]:
    """Return seconds between tokens of streams, and tokens/s of long prompts that run beside them in sequence."""
    streams = [watched.submit(40, max_tokens=3800) for _ in range(options.streams)]
    watched.wait(streams, num_tokens=20)
    began, num_long = time.perf_counter(), 0
    if has_long:
        while time.perf_counter() < began + options.seconds:
            watched.wait([watched.submit(LONG_PROMPT)])
            num_long += 1
    else:
        time.sleep(options.seconds)
    ended = time.perf_counter()
    watched.abort(streams)
    gaps = []
    for name in streams:
        times = [at for at in watched.times[name] if began < at <= ended]
        gaps += [after - before for before, after in pairwise(times)]
    return gaps, num_long * LONG_PROMPT / (ended - began)


def measure_streams(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each setting."""
    ways = {
        "default": Watched(),
        "max_step_ms alone": Watched(max_step_stretch=None),
        "tokens alone": Watched(max_step_stretch=None, max_step_ms=None),
    }
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    for number in range(options.rounds + 1):  # the first one warms up
        for name, watched in ways.items():
            for has_long in (False, True):
                gaps, rate = stream_gaps(watched, options, has_long=has_long)
                if number:
                    found[name, has_long] += gaps
                    rates[name] += [rate] if has_long else []
    for watched in ways.values():
        watched.stop()
    alone = sorted(gap for (_, has_long), gaps in found.items() if not has_long for gap in gaps)
    rows = [_row("no prompts", alone, alone, None)]
    for name in ways:
        rows.append(_row(name, sorted(found[name, True]), alone, statistics.median(rates[name])))
    return rows


def _row(name: str, gaps: list[float], alone: list[float], rate: float | None) -> dict[str, Any]:
    p50, p99 = (gaps[int(q * len(gaps))] for q in (0.5, 0.99))
    return {
        "way": name,
        "tokens": len(gaps),
        "itl_p50_ms": round(p50 * 1e3, 2),
        "itl_p99_ms": round(p99 * 1e3, 2),
        "p50_times_alone": round(p50 / alone[len(alone) // 2], 2),
        "p99_times_alone": round(p99 / alone[int(0.99 * len(alone))], 2),
        "prefill_tokens_per_s": None if rate is None else round(rate),
    }


def measure_first_tokens(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return milliseconds to the first token of prompts that arrive at once."""
    ways = {
        "steps of 256": Watched(max_step_tokens=256),
        "whole prompts, first come first served": Watched(max_step_tokens=4096, max_running=1, policy="fcfs"),
    }
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(options.rounds * 3 + 1):
        for way, watched in ways.items():
            began = time.perf_counter()
            names = {kind: watched.submit(size, max_tokens=4) for kind, size in PROMPTS.items()}
            watched.wait(names.values())
            for kind, name in names.items():
                if number:
                    found[way, kind].append((watched.times[name][0] - began) * 1e3)
    for watched in ways.values():
        watched.stop()
    return [
        {"way": way, **{f"{kind}_ms": round(statistics.median(found[way, kind]), 1) for kind in PROMPTS}}
        for way in ways
    ]


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0, help="least seconds of each setting in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    streams = measure_streams(options)
    _print(f"Time between tokens of {options.streams} streams beside prompts of {LONG_PROMPT} tokens", streams)
    first = measure_first_tokens(options)
    _print("Time to first token, median", first)
    if options.json:
        machine = {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()}
        settings = {"streams": options.streams, "seconds": options.seconds, "rounds": options.rounds}
        report = {"machine": machine, "settings": settings, "time_between_tokens": streams, "first_tokens": first}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
