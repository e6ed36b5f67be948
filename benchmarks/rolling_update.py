"""Update an application to this version of the code under load, and back, without losing a stream.

    python -m benchmarks.rolling_update --before REVISION [--at-once 8] [--json FILE]

`--before` is the git revision that runs first. Starts Ray on test hosts (tests/cluster: needs root and HAProxy).
Meanwhile clients send streams of all kinds again and again, and continue those that break off. The exit code is 1
when a stream was lost or differs from the undisturbed one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from benchmarks.chaos_load import drive, make_resumable_asks
from tests.cluster.support.faults import APPLICATION
from tests.cluster.support.known_answers import Known, client_of, undisturbed
from tests.cluster.support.network import Network
from tests.cluster.support.ray_cluster import RayCluster

ROOT = Path(__file__).resolve().parents[1]
TOKENS = (150, 220)


def main() -> None:
    """Update there and back, print what came of it, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="git revision that runs first")
    parser.add_argument("--at-once", type=int, default=8, help="streams that are open")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with checked_out(options.before) as before, Network() as network:
        cluster = RayCluster(network)
        cluster.deploy(APPLICATION, before)
        known = undisturbed(cluster.url, make_resumable_asks(16, seed=1, tokens=TOKENS))
        rows = [
            {"to": name, **update(cluster, known, code, options.at_once)}
            for name, code in (("this version", ROOT), (options.before, before))
        ]
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if options.json is not None:
        what = {"machine": this_machine.described(), "before": options.before, "at_once": options.at_once}
        options.json.write_text(json.dumps({**what, "updates": rows}, indent=1) + "\n")
    sys.exit(any(row["lost"] or row["different"] for row in rows))


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Yield a directory with the code of a revision, and with the kernels that are built here."""
    with tempfile.TemporaryDirectory() as directory:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)
        for built in (ROOT / "engine/kernels").glob("libraydix*.so"):
            shutil.copy(built, Path(directory, "engine/kernels"))
        yield Path(directory)


def update(cluster: RayCluster, known: Known, code: Path, at_once: int) -> dict[str, Any]:
    """Deploy this code under load; return what became of the streams."""

    async def scenario() -> dict[str, Any]:
        stop, began = asyncio.Event(), time.monotonic()
        async with client_of(cluster.url) as client, asyncio.TaskGroup() as group:
            asked = group.create_task(drive(client, [ask for ask, _ in known], stop, at_once=at_once))
            await asyncio.to_thread(cluster.deploy, APPLICATION, code)
            seconds = time.monotonic() - began
            stop.set()
        outcomes, answers = asked.result(), {ask.name: answer for ask, answer in known}
        for outcome in outcomes:
            if outcome.answer is None:
                print(outcome.ask.name, outcome.error)
        return {
            "seconds": round(seconds),
            "answers": len(outcomes),
            "lost": sum(outcome.answer is None for outcome in outcomes),
            "different": sum(one.answer not in (None, answers[one.ask.name]) for one in outcomes),
            "repeated_events": sum(outcome.num_repeated for outcome in outcomes),
            "reconnects": sum(outcome.num_reconnects for outcome in outcomes),
            "longest_pause_s": round(max(outcome.longest_pause for outcome in outcomes), 2),
        }

    return asyncio.run(scenario())


if __name__ == "__main__":
    main()
