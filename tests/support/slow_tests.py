"""How long tests take, by a run that was measured: tests/slow_tests.txt.

The marker `slow` is for functions that take long, with all their parameters together. `make quick` leaves them
out, and estimates by the rest of each file how many others fit into its time. A run writes the table anew:

    .venv/bin/python -m pytest -n 2 --dist worksteal -m 'not e2e' --durations=0 >LOG
    .venv/bin/python -m tests.support.slow_tests LOG "two cores, nothing else running"
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "slow_tests.txt"
SLOW_S = 0.3
"""Seconds that a function takes at least to be slow: `make quick` has time for most of what is not."""
READ_EVERYTHING = ("tests/house/", "tests/docs/")
"""Tests that any change can reach, as they read all files. `make quick` always runs them."""
SLOW_READER_S = 3.0
"""Seconds that one of these takes at least to be slow."""

_PHASE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+((\S+?\.py)::[^\[\s]+)")
_HEAD = """\
# Seconds that tests take: functions that are slow, then what the rest of each file takes.
# Measured on {date}: {how}.
# Written by: python -m tests.support.slow_tests LOG HOW
"""


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of slow functions by `path::function`, and of all others together by the path of their file."""

    slow: Mapping[str, float]
    rest: Mapping[str, float]


def read_table(table: Path = TABLE) -> Durations:
    """Return what the table says. Raises ValueError for a line that is none of its kind."""
    slow, rest = dict[str, float](), dict[str, float]()
    for number, line in enumerate(table.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#"):
            continue
        match line.split():
            case [seconds, name] if re.fullmatch(r"\d+\.\d", seconds):
                (slow if "::" in name else rest)[name] = float(seconds)
            case _:
                raise ValueError(f"{table.name}:{number} is {line!r}, and 'SECONDS PATH' was expected")
    return Durations(slow, rest)


def measured(log: Iterable[str]) -> Durations:
    """Return what the durations say that pytest printed. Raises ValueError if it printed none."""
    functions: dict[str, float] = defaultdict(float)
    files: dict[str, str] = {}
    for line in log:
        if found := _PHASE.match(line):
            functions[found[2]] += float(found[1])
            files[found[2]] = found[3]
    if not functions:
        raise ValueError("the log has no durations: run pytest with --durations=0")
    slow = {name: seconds for name, seconds in functions.items() if seconds >= _limit(name)}
    rest: dict[str, float] = defaultdict(float)
    for name, seconds in functions.items():
        if name not in slow:
            rest[files[name]] += seconds
    return Durations(slow, rest)


def written(durations: Durations, how: str, date: datetime) -> str:
    """Return the table as text: the slowest function first, then files by name."""
    by_time = sorted(durations.slow.items(), key=lambda entry: (-entry[1], entry[0]))
    entries = [*by_time, *sorted((name, seconds) for name, seconds in durations.rest.items() if seconds >= 0.05)]
    lines = [f"{seconds:.1f} {name}\n" for name, seconds in entries]
    return "".join([_HEAD.format(date=date.date(), how=how), *lines])


def _limit(name: str) -> float:
    return SLOW_READER_S if name.startswith(READ_EVERYTHING) else SLOW_S


def main(log: str, how: str) -> None:
    """Write the table by the log of a run. `how` says where it ran, and beside what."""
    with open(log, encoding="utf-8") as lines:
        TABLE.write_text(written(measured(lines), how, datetime.now(UTC)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
