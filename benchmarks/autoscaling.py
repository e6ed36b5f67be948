"""Autoscaling on recorded traffic and in a burst: how many requests are served in time, and what replicas cost.

    python -m benchmarks.autoscaling TRACE --json benchmarks/results/autoscaling.json

The real policy, its meter, the queue of admission, the router and Serve's delays run over simulated replicas that
take time to boot (`deployments/simulator/scaling/run.py`). `raydix simulate TRACE --autoscale` does the same with
settings of your own. One row is no setting: "engines alone" leaves out the reports of ingresses, so that the
policy sees what is in engines, and not what waits before them. That is what it saw before it got these reports,
when a decision looked at 15 seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from deployments.cli.simulate_autoscale import as_json
from deployments.simulator.fleet.arrivals import Arrivals, Burst, arrivals
from deployments.simulator.fleet.scenario import Scenario
from deployments.simulator.fleet.trace import Trace, read_trace
from deployments.simulator.scaling.report import LEGEND, scaling_table
from deployments.simulator.scaling.result import ScalingResult
from deployments.simulator.scaling.run import ScalingScenario, simulate_scaling
from deployments.simulator.scaling.settings import parse_settings
from router.policy_names import policy_named

FLEET = Scenario(num_replicas=4, num_ingresses=2, load=0.6)
BURST = Burst(10.0, 1000.0, 300.0)
DEFAULT = "min=4,max=40"
SETTINGS: Mapping[str, str] = {
    "4 replicas": "4",
    "40 replicas": "40",
    "engines alone": f"{DEFAULT},look_back_s=15",
    "default": DEFAULT,
    "quick": f"{DEFAULT},upscale_delay_s=5,look_back_s=3",
}
BLIND = "engines alone"


def main() -> None:
    """Simulate, print the tables, and write the figures."""
    options = _options()
    logging.disable(logging.INFO)  # the policy logs what it decides
    console, trace = Console(), read_trace(options.trace)
    fleet_rate = FLEET.num_replicas * FLEET.service.prefill_rate
    recorded = arrivals(trace, FLEET.load, fleet_rate, FLEET.seed)
    traffics = {"recorded": recorded, "burst": recorded.with_burst(BURST)}
    results = {name: _runs(trace, offered, console) for name, offered in traffics.items()}
    for name, rows in results.items():
        console.print(scaling_table(name, rows))
    console.print(LEGEND, style="dim")
    if options.json is not None:
        options.json.write_text(json.dumps(_report(trace, recorded, results), indent=1) + "\n")


def _runs(trace: Trace, offered: Arrivals, console: Console) -> list[ScalingResult]:
    results = []
    for name, text in SETTINGS.items():
        scenario = ScalingScenario(FLEET, parse_settings(text), hears_ingresses=name != BLIND)
        with console.status(name):
            results.append(
                simulate_scaling(name, offered, trace.block_tokens, scenario, lambda: policy_named("cost"))
            )
    return results


def _report(trace: Trace, recorded: Arrivals, results: Mapping[str, list[ScalingResult]]) -> dict[str, Any]:
    scenario = ScalingScenario(FLEET, parse_settings(DEFAULT))
    return {
        "trace": {"name": trace.name, "requests": len(trace.requests), "seconds": recorded.times[-1]},
        "scenario": asdict(FLEET),
        "boot_s": scenario.boot_s,
        "ttft_slo_s": scenario.ttft_slo_s,
        "burst": asdict(BURST),
        "settings": SETTINGS,
        "results": {name: [as_json(row) for row in rows] for name, rows in results.items()},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="mooncake_conversation.jsonl, plain or gzipped")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
