"""Measure how long streams pause under each fault of a cluster, with clients that reconnect.

    python -m benchmarks.stream_faults [--rounds 3] [--streams 32] [--only "ingress killed"]
                                       [--json benchmarks/results/stream_faults.json]

Starts Ray on test hosts (tests/cluster: needs root, HAProxy and, for the head's death, Redis), and has streams of
all kinds run while each fault strikes. The exit code is 1 when a stream was lost, or differs from the undisturbed
one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from benchmarks.chaos_load import RECONNECT_S, Outcome, make_resumable_asks
from tests.cluster.support.faults import APPLICATION, FAULTS, Fault
from tests.cluster.support.known_answers import Known, answers_under, undisturbed
from tests.cluster.support.network import Network
from tests.cluster.support.ray_cluster import RayCluster

TOKENS = (150, 220)
NO_FAULT = "none"


def main() -> None:
    """Measure, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--only", choices=FAULTS, help="measure one fault")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    faults = {NO_FAULT: Fault(lambda network, cluster: None)}
    faults |= {options.only: FAULTS[options.only]} if options.only else FAULTS
    with Network() as network:
        cluster = RayCluster(network)
        cluster.deploy(APPLICATION)
        known = undisturbed(cluster.url, make_resumable_asks(options.streams, seed=1, tokens=TOKENS))
        rows = [
            {"fault": name, **measure(network, cluster, known, fault, options.rounds)}
            for name, fault in faults.items()
            if cluster.outlives_head or not fault.needs_redis
        ]
    show(rows)
    if options.json is not None:
        what = {
            "machine": this_machine.described(),
            "rounds": options.rounds,
            "streams": options.streams,
            "reconnect_s": RECONNECT_S,
        }
        options.json.write_text(json.dumps({**what, "faults": rows}, indent=1) + "\n")
    sys.exit(any(row["lost"] or row["different"] for row in rows))


def measure(network: Network, cluster: RayCluster, known: Known, fault: Fault, rounds: int) -> dict[str, Any]:
    """Have a fault strike in each round, and return what its streams went through."""
    outcomes: list[Outcome] = []
    for _ in range(rounds):
        url = fault.begins_at(cluster)
        outcomes += asyncio.run(answers_under(url, known, lambda: fault.happen(network, cluster), cluster.url))
        fault.end(network, cluster)
    pauses = [outcome.longest_pause for outcome in outcomes if outcome.ask.is_streamed]
    answers = [answer for _, answer in known] * rounds
    return {
        "lost": sum(outcome.answer is None for outcome in outcomes),
        "different": sum(o.answer not in (None, answer) for o, answer in zip(outcomes, answers, strict=True)),
        "repeated_events": sum(outcome.num_repeated for outcome in outcomes),
        "reconnects": sum(outcome.num_reconnects for outcome in outcomes),
        "pause_p50_s": round(statistics.median(pauses), 3),
        "pause_max_s": round(max(pauses), 3),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
