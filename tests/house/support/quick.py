"""`make quick`: what a change can break, as far as three minutes on two cores can tell.

ruff, import-linter and mypy (by its daemon, which knows what it checked before) run beside the tests that the
change can reach, the nearest first, without slow ones. What is left out is named; `make test` runs everything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.house.support.reach import Reach, reach_of
from tests.support.slow_tests import Durations, read_table

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
OTHER_RUNS = {"tests/e2e/": "make e2e", "tests/clients/": "make clients"}
"""Tests that start the real application, and what runs them."""
SECONDS = 120.0
"""Of tests, estimated, on both cores together."""
FILE_S = 0.25
"""What a file takes beside its tests: it is imported, and its tests that take hardly any time."""
NUM_NAMED = 10
"""Most names in a line of the report, if not asked for all."""
LINTERS = (
    ("ruff", "check", "--quiet", "."),
    ("ruff", "format", "--quiet", "--check", "."),
    ("lint-imports",),
    ("dmypy", "run", "--timeout", "3600"),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The test files that are run, the nearest first, and why others are not."""

    run: list[str]
    elsewhere: list[str]
    """Those that another command runs."""
    too_many: list[str]
    """Those for which there is no time, the nearest first."""
    slow: list[str]
    """Functions of the files that are run, by `path::function`, that are left out because they are slow."""


def choose(reach: Reach, durations: Durations, seconds: float) -> Choice:
    """Choose as many of the nearest files as are estimated to take `seconds` at most."""
    choice = Choice([], [], [], [])
    for name in sorted(reach.tests, key=lambda name: (reach.tests[name], name)):
        seconds_left = seconds - FILE_S - durations.rest.get(name, 0.0)
        if name.startswith(tuple(OTHER_RUNS)):
            choice.elsewhere.append(name)
        elif choice.too_many or (seconds_left < 0 and choice.run):
            choice.too_many.append(name)
        else:
            choice.run.append(name)
            seconds = seconds_left
    nearness = {name: at for at, name in enumerate(choice.run)}
    slow = [name for name in durations.slow if name.partition("::")[0] in nearness]
    choice.slow.extend(sorted(slow, key=lambda name: (nearness[name.partition("::")[0]], name)))
    return choice


def changed_files(root: Path = ROOT) -> tuple[str, list[str]]:
    """Return the commit that a change began at, and the paths of all files that differ from it, untracked too.

    It is where the branch left origin/main or main. Raises RuntimeError where there is neither.
    """
    for main in ("origin/main", "main"):
        if base := _git(root, "merge-base", "HEAD", main, may_fail=True):
            differing = _git(root, "diff", "--name-only", "--no-renames", "-z", base)
            untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
            return base, sorted({name for name in (differing + untracked).split("\0") if name})
    raise RuntimeError(
        "there is no branch origin/main or main to compare with: fetch one, or run make test, which needs none"
    )


def _git(root: Path, *arguments: str, may_fail: bool = False) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode and not may_fail:
        raise RuntimeError(f"git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return "" if done.returncode else done.stdout.strip()


def report(reach: Reach, choice: Choice, most: int) -> list[str]:
    """Say what is run, and name what is not, at most so many of each kind."""
    lines = [f"tests: {_counted(choice.run, 'file')} of {_counted(reach.tests, 'file')} that the change can reach"]
    if reach.not_understood:
        lines.append(f"what these reach is not known, only make test tells: {_named(reach.not_understood, most)}")
    if choice.slow:
        lines.append(f"left out as slow (tests/slow_tests.txt): {_named(choice.slow, most)}")
    if choice.too_many:
        lines.append(f"left out for lack of time: {_named(choice.too_many, most)}")
    for folder, command in OTHER_RUNS.items():
        if names := [name for name in choice.elsewhere if name.startswith(folder)]:
            lines.append(f"left out, as {command} runs them: {_named(names, most)}")
    return lines


def _counted(names: Sequence[str] | dict[str, int], what: str) -> str:
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}"


def _named(names: Sequence[str], most: int) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more (--all names them)" if more > 0 else "")


class Linters(threading.Thread):
    """Runs one linter after the other, and keeps what those said that found something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def run(self) -> None:
        for name, *arguments in LINTERS:
            done = subprocess.run([BIN / name, *arguments], cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                self.found.append(f"{name} {' '.join(arguments)}\n{done.stdout}{done.stderr}")


def run_tests(paths: Iterable[str]) -> int:
    """Run the tests of these files that are not slow, on both cores; return pytest's exit status."""
    options = ["-n", "2", "--dist", "worksteal", "-m", "not e2e and not slow", "--disable-warnings"]
    return subprocess.run([sys.executable, "-m", "pytest", *options, *paths], cwd=ROOT).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Check a change; return 0 where all that was run is right."""
    parser = argparse.ArgumentParser(prog="python -m tests.house.support.quick", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of tests, estimated (default: %(default)g)"
    )
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    parser.add_argument("--all", action="store_true", help="name all that is left out")
    asked = parser.parse_args(argv)
    began = time.monotonic()
    base, changed = changed_files()
    print(f"{_counted(changed, 'file')} changed since {base[:12]}")
    reach = reach_of(ROOT, changed)
    choice = choose(reach, read_table(), asked.seconds)
    lines = report(reach, choice, len(reach.tests) + len(choice.slow) if asked.all else NUM_NAMED)
    print(*lines, *(choice.run if asked.list else ()), sep="\n", flush=True)
    if asked.list:
        return 0
    linters = Linters()
    linters.start()
    status = run_tests(choice.run) if choice.run else 0
    linters.join()
    print(*linters.found, sep="\n")
    has_failed = bool(linters.found) or status not in (0, 5)  # 5: all that was chosen is slow
    print(f"make quick: {'FAILED' if has_failed else 'passed'} after {time.monotonic() - began:.0f} s")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
