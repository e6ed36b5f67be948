"""Compare what is lost with replicas whose machines end after a notice, on recorded conversations, simulated.

    python -m benchmarks.notices TRACE [--json benchmarks/results/notices.json]

TRACE is Mooncake's conversation trace, as for benchmarks/routing.py. Each of 16 replicas receives one notice, 30 or
120 s before its end, and is empty again 30 s after it. A replica hands over nothing (a plain drain: its streams may
end, and what is left is lost), or streams and prefixes in an arbitrary order, or the most valuable per second first.
Everything runs in the simulator, so the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from deployments.simulator.fleet.arrivals import arrivals
from deployments.simulator.fleet.fleet import SimulatedFleet
from deployments.simulator.fleet.rivals import SIMULATED
from deployments.simulator.fleet.scenario import HandOver, Notice, Scenario
from deployments.simulator.fleet.service import ServiceModel
from deployments.simulator.fleet.tiers import Tiers
from deployments.simulator.fleet.trace import Trace, read_trace
from router.cost import REUSE_S
from router.policy_names import policy_named

FLEET = Scenario(cache_delay=0.0, load_delay=0.0)
FIRST_S, EVERY_S = 60.0, 48.0
"""Time of the first notice, and between two of them."""
GRACES = (30.0, 120.0)
KEEPS = (65_536, 4_000_000)
"""Tokens of the most used prefixes, of which a replica hands over its own: the default, and all that are tracked."""
LINKS = (1.25e9, 12.5e9)
"""Bandwidths between replicas, in bytes/s."""
SLOW_STEP_S = 0.05
"""A decode step of a large model, with which more streams are still running at the end."""
Row = dict[str, Any]


def main() -> None:
    """Run all, print a table and write the figures."""
    options = _options()
    trace, rows = read_trace(options.trace), []
    console = Console()
    for scenario in _scenarios():
        rows.append(_row(trace, scenario))
        console.print(_line(rows[-1]))
    console.print(_table(rows))
    if options.json is not None:
        document = {
            "trace": {
                "name": trace.name,
                "requests": len(trace.requests),
                "prompt_tokens": trace.num_prompt_tokens,
            },
            "scenario": asdict(FLEET),
            "notices": FLEET.num_replicas,
            "every_s": EVERY_S,
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _scenarios() -> Iterator[Scenario]:
    for grace_s in GRACES:
        notices = tuple(
            Notice(number, FIRST_S + EVERY_S * number, grace_s) for number in range(FLEET.num_replicas)
        )
        cases = [(link, FLEET.service, keep) for link in LINKS for keep in KEEPS]
        cases.append((LINKS[0], ServiceModel(decode_base_s=SLOW_STEP_S), KEEPS[1]))
        for link, service, keep in cases:
            of_link = Tiers(peer_bandwidth=link)
            for order in get_args(HandOver):
                if order == "nothing" and keep == KEEPS[0]:
                    continue
                yield replace(
                    FLEET, tiers=of_link, service=service, keep_tokens=keep, notices=notices, hand_over=order
                )


def _row(trace: Trace, scenario: Scenario) -> Row:
    offered = arrivals(trace, scenario.load, scenario.num_replicas * scenario.service.prefill_rate, scenario.seed)
    fleet = SimulatedFleet(
        trace.block_tokens,
        scenario,
        lambda: policy_named("cost_fetch", SIMULATED),
        REUSE_S / offered.compression,
    )
    fleet.run(offered)
    return {
        "grace_s": scenario.notices[0].grace_s,
        "peer_bandwidth": scenario.tiers.peer_bandwidth,
        "step_s": scenario.service.decode_base_s,
        "keep_tokens": scenario.keep_tokens,
        "hand_over": scenario.hand_over,
        **asdict(fleet.figures),
        "prefilled_tokens": round(sum(fleet.prefill_seconds) * scenario.service.prefill_rate),
    }


def _line(row: Row) -> str:
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in row.items()
    )


def _table(rows: list[Row]) -> Table:
    names = list(rows[0])
    table = Table(*names, title="replicas that end after a notice")
    for row in rows:
        table.add_row(*(f"{row[name]:,}" if isinstance(row[name], int) else str(row[name]) for name in names))
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="mooncake_conversation.jsonl, plain or gzipped")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
