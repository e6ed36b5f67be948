"""`raydix simulate --autoscale`: the cost of autoscaling settings, and how many requests they serve in time."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from deployments.cli.errors import UserError, one_line
from deployments.config.autoscaling import AutoscalingSettings
from deployments.simulator.fleet.arrivals import Arrivals, Burst, arrivals
from deployments.simulator.fleet.rivals import SIMULATED
from deployments.simulator.fleet.scenario import Scenario
from deployments.simulator.fleet.trace import Trace
from deployments.simulator.scaling.report import LEGEND, scaling_table
from deployments.simulator.scaling.result import ScalingResult
from deployments.simulator.scaling.run import ScalingScenario, simulate_scaling
from deployments.simulator.scaling.settings import default_settings, named
from router.policies import Policy
from router.policy_names import policy_named

BURST_FACTOR = 10.0
BURST_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """The command line's options of autoscaling."""

    settings: Sequence[str] = ()
    """Each in the form of `parse_settings`; none: `default_settings`."""
    burst: str | None = None
    """In the form of `Burst.parse`; None: ten times as much for 300 s, after a third of the requests."""
    boot_s: float = 60.0
    ttft_slo_s: float = 5.0


def compare(
    trace: Trace, scenario: Scenario, policies: Sequence[str], options: ScalingOptions, json_path: Path | None
) -> None:
    """Run the trace without and with a burst, and print a table of each. Raises ValueError for wrong settings."""
    console = Console()
    rows = named(options.settings or default_settings(scenario.num_replicas))
    fleet_rate = scenario.num_replicas * scenario.service.prefill_rate
    recorded = arrivals(trace, scenario.load, fleet_rate, scenario.seed)
    burst = Burst.parse(options.burst) if options.burst is not None else _default_burst(recorded)
    with_burst = f"{burst.factor:g} times as much from {burst.start:g} s on for {burst.seconds:g} s"
    traffics = {"as recorded": recorded, with_burst: recorded.with_burst(burst)}
    base = ScalingScenario(scenario, next(iter(rows.values())), options.boot_s, options.ttft_slo_s)
    console.print(f"[bold]{_title(trace, base)}[/]\n")
    results = {}
    for title, offered in traffics.items():
        with console.status(title), _without_logs():
            results[title] = list(_runs(offered, trace.block_tokens, base, rows, policies))
        console.print(scaling_table(title, results[title]))
    console.print(LEGEND, style="dim")
    if json_path is not None:
        _write_json(json_path, trace, base, burst, list(results.values()))


def _runs(
    offered: Arrivals,
    block_tokens: int,
    base: ScalingScenario,
    rows: Mapping[str, AutoscalingSettings],
    policies: Sequence[str],
) -> Iterator[ScalingResult]:
    for policy in policies:
        for name, settings in rows.items():
            title = name if len(policies) == 1 else f"{policy}: {name}"
            yield simulate_scaling(
                title, offered, block_tokens, replace(base, autoscaling=settings), _factory(policy)
            )


@contextmanager
def _without_logs() -> Iterator[None]:
    """Suppress the policy's logs of its decisions."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _factory(policy: str) -> Callable[[], Policy]:
    return lambda: policy_named(policy, SIMULATED)


def _default_burst(recorded: Arrivals) -> Burst:
    return Burst(BURST_FACTOR, float(math.floor(recorded.times[len(recorded.times) // 3])), BURST_SECONDS)


def _title(trace: Trace, scenario: ScalingScenario) -> str:
    fleet = scenario.fleet
    return (
        f"{trace.name}: {len(trace.requests):,} requests, {fleet.load:g} of what {fleet.num_replicas} replicas "
        f"prefill; replicas boot for {scenario.boot_s:g} s; the objective is a first token within "
        f"{scenario.ttft_slo_s:g} s"
    )


def _write_json(
    path: Path, trace: Trace, scenario: ScalingScenario, burst: Burst, results: Sequence[Sequence[ScalingResult]]
) -> None:
    report = {
        "trace": trace.name,
        "scenario": asdict(scenario.fleet),
        "boot_s": scenario.boot_s,
        "ttft_slo_s": scenario.ttft_slo_s,
        "burst": asdict(burst),
        "results": dict(
            zip(("recorded", "burst"), ([as_json(row) for row in rows] for rows in results), strict=True)
        ),
    }
    try:
        path.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: {one_line(error)}") from None


def as_json(result: ScalingResult) -> dict[str, Any]:
    """Return a result's figures; null for missing ones."""
    row = {**asdict(result), "most": result.most}
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
