"""Compare routing policies on recorded conversations, and check the figures that Raydix's own must reach.

    python -m benchmarks.routing TRACE [--json benchmarks/results/routing.json] [--plots docs]

TRACE is Mooncake's conversation trace (github.com/kvcache-ai/Mooncake, FAST25-release/traces). Everything runs in
the simulator, so only the seconds that a run takes depend on the machine. Exits with 1 when a bar
is missed.

The lead over `linear` depends on how long requests decode, as `linear` avoids memory in use: with decode steps of
4 ms its TTFT p95 is 3.0 s, with 30 ms 7.1 s (with the 12 ms here 4.4 s); `cost` has 2.7 s with either. With all
the cache of the fleet and no queue the p95 would be 2.5 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deployments.simulator.fleet.bounds import pooled_hit_rate
from deployments.simulator.fleet.fleet import simulate
from deployments.simulator.fleet.report import LEGEND, tables
from deployments.simulator.fleet.result import Result
from deployments.simulator.fleet.rivals import SIMULATED
from deployments.simulator.fleet.scenario import Scenario
from deployments.simulator.fleet.trace import Trace, read_trace
from router.policies import Policy
from router.policy_names import policy_named

POLICIES = (
    "cost", "affinity", "kv_aware", "sticky", "threshold", "linear", "product", "product_queue", "rendezvous",
    "least_loaded", "pow2", "round_robin", "random",
)  # fmt: skip
RIVALS = ("threshold", "linear", "product", "affinity")
"""Policies of whose best TTFT p95 `cost` may have 0.7. Of those of `CLOSE`, 0.7 would be less than the time of
prompts with all the cache of the fleet and no queue: `cost` must only be better than they are."""
CLOSE = ("kv_aware", "sticky", "product_queue")
KNOWING = Scenario(cache_delay=0.0, load_delay=0.0)
"""One ingress that knows everything at once, so that only the rules are compared."""
SEVERAL = Scenario(num_ingresses=4, cache_delay=1.0, load_delay=0.05)
LOADS = (0.6, 0.85, 1.1)
SIZES = (16, 64, 256)


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and its limit."""

    name: str
    value: float
    limit: float
    is_least: bool
    """Whether `limit` is the least that passes, or the most."""

    @property
    def is_held(self) -> bool:
        return self.value >= self.limit if self.is_least else self.value <= self.limit


class Bench:
    def __init__(self, trace: Trace, console: Console) -> None:
        self.trace = trace
        self.seconds = 0.0
        """Seconds of the longest run."""
        self._console = console

    def run(self, policy: str, scenario: Scenario) -> Result:
        make: Callable[[], Policy] = lambda: policy_named(policy, SIMULATED)  # noqa: E731
        began = time.perf_counter()
        with self._console.status(f"{policy}, {scenario.num_replicas} replicas, load {scenario.load:g}"):
            result = simulate(self.trace, scenario, policy, make)
        self.seconds = max(self.seconds, time.perf_counter() - began)
        return result

    def show(self, title: str, results: Sequence[Result], scenario: Scenario) -> float:
        pooled = pooled_hit_rate(self.trace, scenario.num_replicas * scenario.cache_tokens)
        self._console.print(f"\n[bold]{title}[/]: one cache of the fleet's size finds {pooled:.1%}")
        for table in tables(results, pooled):
            self._console.print(table)
        return pooled


def main() -> None:
    options = _options()
    console = Console()
    bench = Bench(read_trace(options.trace), console)
    knowing = [bench.run(name, replace(KNOWING, load=load)) for load in LOADS for name in POLICIES]
    pooled = bench.show("16 replicas, one ingress that knows all", knowing, KNOWING)
    several = [bench.run(name, SEVERAL) for name in POLICIES]
    bench.show("16 replicas, 4 ingresses, caches known 1 s late and loads 50 ms", several, SEVERAL)
    growing = []
    for size in SIZES:
        scenario = replace(SEVERAL, num_replicas=size)
        rows = [bench.run(name, scenario) for name in ("cost", "linear", "random")]
        bench.show(f"{size} replicas, 4 ingresses, news as above", rows, scenario)
        growing += rows
    large_seconds = _large_run(bench)
    bars = _bars(knowing, several, growing, large_seconds)
    console.print(LEGEND, style="dim")
    console.print(_table(bars))
    if options.json is not None:
        _write(options.json, bench.trace, pooled, bars, {"knowing": knowing, "several": several, "sizes": growing})
    if options.plots is not None:
        _draw(options.plots, knowing, pooled)
    sys.exit(0 if all(bar.is_held for bar in bars) else 1)


def _large_run(bench: Bench) -> float:
    began = time.perf_counter()
    bench.run("cost", replace(SEVERAL, num_replicas=64))
    return time.perf_counter() - began


def _bars(
    knowing: Sequence[Result], several: Sequence[Result], growing: Sequence[Result], large_seconds: float
) -> list[Bar]:
    at_load = {result.policy: result for result in knowing if result.load == KNOWING.load}
    ours, ours_several = at_load["cost"], next(result for result in several if result.policy == "cost")
    best = min(at_load[name].ttft_p95 for name in RIVALS)
    closest = min(at_load[name].ttft_p95 for name in CLOSE)
    sizes = {(result.num_replicas, result.policy): result for result in growing}
    bars = [
        Bar("one ingress: hit rate", ours.hit_rate, 0.34, True),
        Bar(f"one ingress: TTFT p95, s (0.7 x {best:.2f})", ours.ttft_p95, 0.7 * best, False),
        Bar("one ingress: TTFT p95, s (the closest rival's)", ours.ttft_p95, closest, False),
        Bar("one ingress: prefill skew", ours.prefill_skew, 1.15, False),
        Bar("4 ingresses, old news: hit rate", ours_several.hit_rate, 0.335, True),
        Bar("4 ingresses, old news: prefill skew", ours_several.prefill_skew, 1.15, False),
    ]
    for size in SIZES[1:]:
        # A replica of a large fleet gets few prompts, so a skew as large as that of random routing is allowed.
        bars.append(
            Bar(f"{size} replicas: TTFT p95, s (1.2 x 16's)", sizes[size, "cost"].ttft_p95,
                1.2 * sizes[16, "cost"].ttft_p95, False)
        )  # fmt: skip
        bars.append(
            Bar(f"{size} replicas: prefill skew (random's)", sizes[size, "cost"].prefill_skew,
                sizes[size, "random"].prefill_skew, False)
        )  # fmt: skip
    bars.append(Bar("64 replicas: the run's seconds", large_seconds, 120.0, False))
    return bars


def _table(bars: Sequence[Bar]) -> Table:
    out = Table(title="Bars", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("", "measured", "", "held"):
        out.add_column(heading, justify="right" if heading == "measured" else "left")
    for bar in bars:
        sign = ">=" if bar.is_least else "<="
        held = "[green]yes[/]" if bar.is_held else "[bold red]NO[/]"
        out.add_row(bar.name, f"{bar.value:.3f}", f"{sign} {bar.limit:.3f}", held)
    return out


def _write(path: Path, trace: Trace, pooled: float, bars: Sequence[Bar], results: dict[str, list[Result]]) -> None:
    report = {
        "trace": {"name": trace.name, "requests": len(trace.requests), "prompt_tokens": trace.num_prompt_tokens},
        "scenarios": {"knowing": asdict(KNOWING), "several": asdict(SEVERAL)},
        "pooled_hit_rate": pooled,
        "bars": [asdict(bar) | {"is_held": bar.is_held} for bar in bars if "seconds" not in bar.name],
        "results": {name: [asdict(row) for row in rows] for name, rows in results.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def _draw(directory: Path, knowing: Sequence[Result], pooled: float) -> None:
    from benchmarks.routing_loads import draw_loads
    from deployments.simulator.fleet.plots import draw

    directory.mkdir(parents=True, exist_ok=True)
    at_load = [result for result in knowing if result.load == KNOWING.load]
    title = "12,031 recorded conversation turns, 16 replicas x 2.1M tokens of KV, simulated"
    draw(directory / "routing.png", at_load, pooled, title)
    draw_loads(directory / "routing_loads.png", knowing, title)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="mooncake_conversation.jsonl, plain or gzipped")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plots", type=Path, help="draw routing.png and routing_loads.png in this directory")
    return parser.parse_args()


if __name__ == "__main__":
    main()
