"""What host memory, files and fetches between replicas are worth on recorded conversations, simulated.

    python -m benchmarks.tiers TRACE [--json benchmarks/results/tiers.json] [--plots docs] [--sections sizes,links]

TRACE is Mooncake's conversation trace, as for benchmarks/routing.py. Everything runs in the simulator, so the
figures do not depend on the machine; all sections take about eight minutes of one core. A section that is left out
keeps its figures in the file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from deployments.simulator.fleet.bounds import pooled_hit_rate, ttft_without_queue
from deployments.simulator.fleet.fleet import simulate
from deployments.simulator.fleet.rivals import SIMULATED
from deployments.simulator.fleet.roles import Roles
from deployments.simulator.fleet.scenario import Scenario
from deployments.simulator.fleet.tiers import Tiers
from deployments.simulator.fleet.trace import Trace, read_trace
from router.policy_names import policy_named

FLEET = Scenario(cache_delay=0.0, load_delay=0.0)
"""One ingress that knows everything at once, so that rules and memory are compared and nothing else."""
SIZES = (524_288, 2_097_152)
HOST_FACTOR = 4
"""Host memory of a replica over its device's KV memory."""
STORE_TOKENS = 167_772_160
"""Files that all share: more than all prompts of the trace."""
PEER = 12.5e9
RIVALS = ("threshold", "linear", "product_queue", "affinity")
LINKS = (1e9, 2e9, 5e9, 12.5e9, 50e9)
"""Bandwidths between peers, in bytes/s."""
PREFILL = (10, 12)
"""Replicas of 16 that compute prompts, where others decode."""
LOADS = (0.85, 1.1, 1.3, 1.4)


def tiers_of(size: int) -> dict[str, Tiers]:
    """Return what is compared for replicas with KV memory of `size` tokens, by name."""
    twice = Tiers(host_tokens=HOST_FACTOR * size)
    host = replace(twice, host_min_uses=1)
    return {
        "none": Tiers(),
        "host_twice": twice,
        "host": host,
        "peers_alone": Tiers(peer_bandwidth=PEER),
        "host_files": replace(host, file_tokens=STORE_TOKENS, is_file_store_shared=True),
        "host_peers": replace(host, peer_bandwidth=PEER),
    }


def _all_of(size: int) -> Tiers:
    return tiers_of(size)["host_peers"]


class Study:
    """Runs that were made, each once."""

    def __init__(self, trace: Trace, console: Console) -> None:
        self.trace = trace
        self._console = console
        self._made: dict[tuple[Scenario, str], dict[str, Any]] = {}

    def run(self, policy: str, scenario: Scenario) -> dict[str, Any]:
        """Return a run's figures."""
        if (scenario, policy) not in self._made:
            began = time.process_time()
            result = simulate(self.trace, scenario, policy, lambda: policy_named(policy, SIMULATED))
            self._made[scenario, policy] = asdict(result)
            self._console.print(
                f"{policy:14} {scenario.cache_tokens / 1e6:.1f}M{scenario.tiers.title}, load {scenario.load:g}: "
                f"hits {result.hit_rate:.1%}, TTFT p50 {result.ttft_p50:.2f} s, p95 {result.ttft_p95:.2f} s "
                f"({time.process_time() - began:.0f} s)"
            )
        return self._made[scenario, policy]

    def sizes(self) -> list[dict[str, Any]]:
        """Each tier at both sizes, with our rule and the rivals'."""
        rows = []
        for size in SIZES:
            for name, tiers in tiers_of(size).items():
                scenario = replace(FLEET, cache_tokens=size, tiers=tiers)
                ours = "cost_fetch" if tiers.has_fetches else "cost"
                rivals = RIVALS if name in ("host", "host_peers") else ()
                for policy in (ours, *rivals):
                    rows.append({"tokens": size, "tiers": name, **self.run(policy, scenario)})
        return rows

    def links(self) -> list[dict[str, Any]]:
        """Which bandwidth between peers makes fetches pay, with the small memory and its host tier."""
        tiers = _all_of(SIZES[0])
        return [
            {
                "bandwidth": bandwidth,
                **self.run("cost_fetch", self._small(replace(tiers, peer_bandwidth=bandwidth))),
            }
            for bandwidth in LINKS
        ]

    def loads(self) -> list[dict[str, Any]]:
        """The small memory under more load, without tiers and with them."""
        found = tiers_of(SIZES[0])
        return [
            {"tiers": name, **self.run(policy, replace(self._small(found[name]), load=load))}
            for load in LOADS
            for name, policy in (("none", "cost"), ("host", "cost"), ("host_peers", "cost_fetch"))
        ]

    def roles(self) -> list[dict[str, Any]]:
        """Prefill and decode apart, with the small memory, its host tier and fetches."""
        scenario = self._small(_all_of(SIZES[0]))
        splits = [Roles(number, FLEET.num_replicas - number) for number in PREFILL]
        return [asdict(one) | self.run("cost_fetch", replace(scenario, roles=one)) for one in splits]

    def bounds(self) -> dict[str, Any]:
        """What one cache would find, and the TTFT with an unlimited one and no queue."""
        pooled = {str(size): pooled_hit_rate(self.trace, FLEET.num_replicas * size) for size in SIZES}
        floor = {f"p{share}": ttft_without_queue(self.trace, FLEET.service, share / 100) for share in (50, 95)}
        return {"pooled": pooled, "unlimited": pooled_hit_rate(self.trace, 2**60), "ttft_without_queue": floor}

    @staticmethod
    def _small(tiers: Tiers) -> Scenario:
        return replace(FLEET, cache_tokens=SIZES[0], tiers=tiers)


SECTIONS = ("bounds", "sizes", "links", "loads", "roles")


def main() -> None:
    """Make the sections that were asked for, and write them."""
    options = _options()
    study = Study(read_trace(options.trace), Console())
    report: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        report = json.loads(options.json.read_text("utf-8"))
    report["trace"] = {"name": study.trace.name, "requests": len(study.trace.requests)}
    report["scenario"] = asdict(FLEET)
    report["peer_bandwidth"] = PEER
    for section in options.sections:
        report[section] = getattr(study, section)()
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plots is not None:
        draw(options.plots / "tiers.png", report)


def draw(path: Path, report: Mapping[str, Any]) -> None:
    """Draw the hit rate and the TTFT p95 over the bandwidth between peers."""
    from matplotlib.figure import Figure

    from deployments.simulator.fleet.plots import HIGHLIGHT, INK, PALE, QUIET

    rows: Sequence[Mapping[str, Any]] = report["links"]
    alone = next(row for row in report["sizes"] if row["tokens"] == SIZES[0] and row["tiers"] == "host")
    figure = Figure(figsize=(8, 3.2), facecolor="white", layout="constrained")
    figure.suptitle("16 replicas x 0.5M tokens, 2.1M more on each host, simulated", x=0.01, ha="left", fontsize=9,
                    color=QUIET)  # fmt: skip
    for axes, key, title in zip(
        figure.subplots(1, 2), ("hit_rate", "ttft_p95"), ("Hit rate", "Time to first token, p95, s"), strict=True
    ):
        axes.plot([row["bandwidth"] / 1e9 for row in rows], [row[key] for row in rows], "o-", color=HIGHLIGHT)
        axes.axhline(alone[key], color=QUIET, linewidth=1)
        axes.annotate("no fetches", (rows[-1]["bandwidth"] / 1e9, alone[key]), xytext=(0, 4), ha="right",
                      textcoords="offset points", fontsize=8, color=QUIET)  # fmt: skip
        axes.set_xscale("log")
        axes.set_xticks([row["bandwidth"] / 1e9 for row in rows], [f"{row['bandwidth'] / 1e9:g}" for row in rows])
        axes.minorticks_off()
        axes.grid(color=PALE, linewidth=0.8)
        axes.set_xlabel("GB/s between peers, each way", fontsize=9, color=INK)
        axes.set_title(title, fontsize=10, color=INK, loc="left")
    figure.savefig(path, dpi=130, format="png")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="mooncake_conversation.jsonl, plain or gzipped")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plots", type=Path, help="draw tiers.png in this directory")
    parser.add_argument("--sections", type=_sections, default=SECTIONS, help=f"of {','.join(SECTIONS)}; all")
    return parser.parse_args()


def _sections(text: str) -> Sequence[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"unknown sections {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return names


if __name__ == "__main__":
    main()
