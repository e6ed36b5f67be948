"""Compare what is lost with replicas whose machines end after a notice, on recorded conversations, simulated.

    python -m benchmarks.notices TRACE [--json benchmarks/results/notices.json]

TRACE is Mooncake's conversation trace, as for benchmarks/routing.py. Each of 16 replicas receives one notice, 30 s
or 120 s before its end, and serves again, empty, 30 s after it. It hands over nothing (a plain drain: streams may
end, and what is left is lost), or streams and prefixes in an arbitrary order, or those first that save the most
tokens per second. Rows are sums of several runs, with other arrivals in each. Everything runs in the simulator, so
the figures do not depend on the machine; it takes some minutes of one core.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from deployments.simulator.fleet.arrivals import arrivals
from deployments.simulator.fleet.fleet import SimulatedFleet
from deployments.simulator.fleet.rivals import SIMULATED
from deployments.simulator.fleet.scenario import AnnouncedEnd, HandOver, Scenario
from deployments.simulator.fleet.service import ServiceModel
from deployments.simulator.fleet.tiers import Tiers
from deployments.simulator.fleet.trace import Trace, read_trace
from router.cost import REUSE_S
from router.policy_names import policy_named

FLEET = Scenario(cache_delay=0.0, load_delay=0.0, keep_tokens=4_000_000)
"""After a notice, all prefixes come into question that ingresses track (`warm_up.track_tokens`)."""
SEEDS = range(3)
FIRST_S, EVERY_S = 60.0, 48.0
"""Time of the first notice, and between two of them."""
GRACES = (30.0, 120.0)
LINKS = (0.3e9, 1.25e9, 12.5e9)
"""Bandwidths between replicas, in bytes/s."""
STEPS_S = (0.012, 0.05)
"""Decode steps. The second is that of a large model, with which more streams are still running at the end."""
Row = dict[str, Any]


def main() -> None:
    """Run all, print a table and write the figures."""
    options = _options()
    trace, rows = read_trace(options.trace), []
    console = Console()
    for scenario in _scenarios():
        with console.status(f"{scenario.tiers.title}, {scenario.notices[0].grace_s:g} s, {scenario.hand_over}"):
            rows.append(_row(trace, scenario))
    console.print(_table(rows))
    if options.json is not None:
        of_trace = {"requests": len(trace.requests), "prompt_tokens": trace.num_prompt_tokens}
        document = {"trace": of_trace, "scenario": asdict(FLEET), "runs": len(SEEDS), "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _scenarios() -> Iterator[Scenario]:
    cases = [(link, STEPS_S[0]) for link in LINKS] + [(LINKS[1], STEPS_S[1])]
    for grace_s in GRACES:
        notices = tuple(AnnouncedEnd(at, FIRST_S + EVERY_S * at, grace_s) for at in range(FLEET.num_replicas))
        for link, step_s in cases:
            tiers, service = Tiers(peer_bandwidth=link), ServiceModel(decode_base_s=step_s)
            for order in get_args(HandOver):
                yield replace(FLEET, tiers=tiers, service=service, notices=notices, hand_over=order)


def _row(trace: Trace, scenario: Scenario) -> Row:
    total = Counter[str]()
    for seed in SEEDS:
        fleet_rate = scenario.num_replicas * scenario.service.prefill_rate
        offered = arrivals(trace, scenario.load, fleet_rate, seed)
        policy = partial(policy_named, "cost_fetch", SIMULATED)
        reuse_s = REUSE_S / offered.compression
        fleet = SimulatedFleet(trace.block_tokens, replace(scenario, seed=seed), policy, reuse_s)
        fleet.run(offered)
        total.update(asdict(fleet.figures))
    return {
        "grace_s": scenario.notices[0].grace_s,
        "peer_bandwidth": scenario.tiers.peer_bandwidth,
        "step_s": scenario.service.decode_base_s,
        "hand_over": scenario.hand_over,
        "num_notices": len(scenario.notices) * len(SEEDS),
        **total,
    }


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
