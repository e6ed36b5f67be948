"""`raydix simulate`: replay recorded traffic through a simulated fleet and print a row per policy and load.

With `--autoscale`, a row per setting of autoscaling: `deployments/cli/simulate_autoscale.py`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from deployments.cli.errors import UserError, one_line
from deployments.cli.simulate_autoscale import ScalingOptions, compare
from deployments.simulator.fleet.bounds import pooled_hit_rate
from deployments.simulator.fleet.example_trace import EXAMPLE
from deployments.simulator.fleet.fleet import simulate
from deployments.simulator.fleet.report import LEGEND, tables
from deployments.simulator.fleet.result import Result
from deployments.simulator.fleet.rivals import SIMULATED
from deployments.simulator.fleet.scenario import Kill, Scenario
from deployments.simulator.fleet.service import ServiceModel, read_calibration
from deployments.simulator.fleet.trace import Trace, read_trace
from router.policies import Policy
from router.policy_names import policy_named

DEFAULT_POLICIES = "cost,least_loaded,random"


def run(
    path: Path | None,
    *,
    policies: str | None,
    loads: str,
    kills: Sequence[str],
    scenario: Scenario,
    prefill_rate: float | None,
    calibration: Path | None,
    requests: int | None,
    json_path: Path | None,
    plot_path: Path | None,
    scaling: ScalingOptions | None = None,
) -> None:
    """Simulate, print and write the results; without a path, with the trace that comes with Raydix.

    Raises UserError for a wrong trace, policy or setting.
    """
    console = Console()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for the user's own policies, as in `serve run`
    try:
        draw = _plotter() if plot_path is not None else None
        names = _names(policies or (DEFAULT_POLICIES if scaling is None else "cost"))
        if path is None:
            console.print(f"No trace was given, so this uses the example: {EXAMPLE}", style="dim", highlight=False)
        trace = read_trace(path or EXAMPLE)
        trace = trace.head(requests) if requests is not None else trace
        service = read_calibration(calibration) if calibration is not None else ServiceModel()
        if prefill_rate is not None:
            service = replace(service, prefill_rate=prefill_rate)
        scenario = replace(scenario, service=service, kills=tuple(map(Kill.parse, kills)))
        scenarios = [replace(scenario, load=load) for load in _numbers(loads)]
        if not trace.has_prefixes:
            console.print(
                f"[yellow]{trace.name} records no prefixes: prompts count as new, hit rates mean nothing.[/]"
            )
        if scaling is not None:
            _check_scaled(scenarios, plot_path)
            compare(trace, scenarios[0], names, scaling, json_path)
            return
        results = _simulate_all(trace, scenarios, names, console)
    except ValueError as error:
        raise UserError(one_line(error)) from None
    pooled = pooled_hit_rate(trace, scenario.num_tokens)
    console.print(f"[bold]{_title(trace, scenario)}[/]\n")
    for table in tables(results, pooled):
        console.print(table)
    console.print(f"One LRU cache of the fleet's size would find {pooled:.1%} of the prompt tokens.")
    console.print(LEGEND, style="dim")
    if json_path is not None:
        _write_json(json_path, trace, scenario, pooled, results)
    if draw is not None and plot_path is not None:
        draw(plot_path, results, pooled, _title(trace, scenario))
        console.print(f"plots: {plot_path}")


def _check_scaled(scenarios: Sequence[Scenario], plot_path: Path | None) -> None:
    """Raise ValueError for options that cannot be combined with autoscaling."""
    if scenarios[0].kills:
        raise ValueError("--autoscale and --kill cannot be combined: --kill needs a fixed number of replicas")
    if scenarios[0].roles is not None:
        raise ValueError("--autoscale and --roles cannot be combined: only fleets without roles are scaled")
    if plot_path is not None:
        raise ValueError(
            "--autoscale and --plot cannot be combined: only routing is drawn; --json has all figures"
        )
    if len(scenarios) > 1:
        raise ValueError("--autoscale takes one --load: replicas' costs are compared under one load")


def _simulate_all(
    trace: Trace, scenarios: Sequence[Scenario], names: Sequence[str], console: Console
) -> list[Result]:
    results = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        for scenario in scenarios:
            for name in names:
                progress.update(task, description=f"{name} at load {scenario.load:g}")
                results.append(simulate(trace, scenario, name, _factory(name)))
    return results


def _factory(name: str) -> Callable[[], Policy]:
    return lambda: policy_named(name, SIMULATED)


def _names(policies: str) -> list[str]:
    """Return policies by name; "all" means ours and the rivals'. Creates each once to check it."""
    names = list(SIMULATED) if policies == "all" else [name.strip() for name in policies.split(",")]
    for name in names:
        policy_named(name, SIMULATED)
    return list(dict.fromkeys(names))


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--load: expected numbers such as 0.6,0.85, got {text!r}") from None


def _plotter() -> Callable[[Path, Sequence[Result], float, str], None]:
    """Check for matplotlib first, so that users do not wait for a simulation whose plots cannot be drawn."""
    try:
        from deployments.simulator.fleet.plots import draw
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'raydix[plots]'") from None
    return draw


def _title(trace: Trace, scenario: Scenario) -> str:
    ingresses = f"{scenario.num_ingresses} ingress" + ("es" if scenario.num_ingresses > 1 else "")
    apart = scenario.roles
    roles = "" if apart is None else f", {apart.prefill} for prefill and {apart.decode} for decode"
    return (
        f"{trace.name}: {len(trace.requests):,} requests, {scenario.num_replicas} replicas x "
        f"{scenario.cache_tokens / 1e6:.1f}M tokens of KV{scenario.tiers.title}{roles}, {ingresses}, "
        f"news {scenario.cache_delay:g} s (cache) and {scenario.load_delay:g} s (load) old"
    )


def _write_json(path: Path, trace: Trace, scenario: Scenario, pooled: float, results: Sequence[Result]) -> None:
    rows = [
        {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
        for row in map(asdict, results)
    ]
    report = {"trace": trace.name, "scenario": asdict(scenario), "pooled_hit_rate": pooled, "results": rows}
    try:
        path.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: {one_line(error)}") from None
