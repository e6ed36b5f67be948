"""Compare Raydix with other engines on a CPU: same weights, same token ids, same threads, in one run.

    benchmarks/peers/install.sh                      # once; each peer gets its own environment
    python -m benchmarks.compare [--quick] [--models llama-15m] [--precision float32]

Engines (`benchmarks/peers/NAME.py`): Raydix through `LLM`, vLLM's CPU build, OpenVINO GenAI's continuous batching,
llama.cpp's server, transformers' continuous batching. Each runs in a process of its own and gets the same jobs
(`benchmarks/peers/workloads.py`); answers have a fixed length whatever their text, and their tokens are counted.
Models are made here with random weights. Engines that are not installed or fail are named and left out.
`benchmarks.compare_http` compares servers.

Rounds alternate: job after job goes to every engine in turn where all fit into memory at once, else an engine is
started anew for its turn. Tables show each engine's best round (in brackets its worst), and Raydix's best over the
best peer's with the lowest and highest of single rounds; then Raydix's share of the machine's limits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.peers import chart, summary
from benchmarks.peers.ceilings import NOTHING, Ceilings, decode_share, measure, prefill_share
from benchmarks.peers.models import CONFIGS, FIRST_WORD, all_parameters, kv_numbers, make_model
from benchmarks.peers.process import PEERS, RAYDIX, REPOSITORY, Peer, PeerFailed
from benchmarks.peers.protocol import Job, Settings
from benchmarks.peers.summary import Sample
from benchmarks.peers.workloads import FULL, QUICK, Sizes, make_jobs, make_warm_up

WIDTHS = {"bfloat16": 2, "float32": 4}


@dataclass(slots=True)
class Comparison:
    """The measurements of one model so far, and the engines that were left out."""

    model: str
    settings: Settings
    sizes: Sizes
    options: argparse.Namespace
    samples: list[Sample] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    agreed: dict[str, list[float]] = field(default_factory=dict)
    ceilings: Ceilings = NOTHING
    _tokens: dict[tuple[int, str], dict[str, list[list[int]]]] = field(default_factory=dict)

    def run(self) -> None:
        together = self._fit_together()
        engines = [RAYDIX, *self.options.peers]
        with ExitStack() as stack:
            loaded: dict[str, Peer] = {}
            for number in range(self.options.rounds):
                found = measure(self.settings.precision, self.settings.threads)
                self.ceilings = self.ceilings.best(found)
                jobs = make_jobs(self.sizes, self.ids, number)
                for name, names in _turns(jobs, _rotated(engines, number), together):
                    if name in self.left_out:
                        continue
                    try:
                        peer = loaded.get(name) or self._start(name, stack)
                        loaded[name] = peer
                        for workload in names:
                            self._measure(peer, number, workload, jobs[workload])
                    except PeerFailed as failure:
                        self._leave_out(name, str(failure))
                    if not together and name in loaded:
                        loaded.pop(name).stop()
        self._compare_tokens()

    @property
    def ids(self) -> range:
        """The token ids that prompts are drawn from."""
        return range(FIRST_WORD, CONFIGS[self.model]["vocab_size"] - 1)

    def _fit_together(self) -> bool:
        """Whether all engines' weights (twice, for those that pack them) and KV fit into memory at once."""
        config, width = CONFIGS[self.model], WIDTHS[self.settings.precision]
        numbers = 2 * all_parameters(config) + kv_numbers(config) * self.settings.kv_tokens
        available: int = psutil.virtual_memory().available
        return (width * numbers + 2**30) * (1 + len(self.options.peers)) < available

    def _start(self, name: str, stack: ExitStack) -> Peer:
        log = self.options.logs / f"{self.model}-{name}.log"
        print(f"{self.model}: {name} loads", flush=True)
        peer = Peer(name, self.options.home, self.settings, log, self.options.timeout)
        stack.callback(peer.stop)
        self.versions[name] = peer.version
        for job in make_warm_up(self.sizes, self.ids):
            peer.run(job)
        return peer

    def _measure(self, peer: Peer, number: int, workload: str, job: Job) -> None:
        answer = peer.run(job)
        speed = summary.speed(workload, job, answer.seconds)
        self.samples.append(Sample(peer.name, workload, number, answer.seconds, speed))
        self._tokens.setdefault((number, workload), {})[peer.name] = answer.tokens
        unit = summary.UNITS.get(workload, "tok/s")
        shown = summary.shown(workload, speed)
        print(f"{self.model}, round {number + 1}: {workload:18s} {peer.name:12s} {shown:9.1f} {unit}", flush=True)

    def _leave_out(self, name: str, why: str) -> None:
        if name == RAYDIX:
            raise SystemExit(why)
        print(f"left out: {why}", flush=True)
        self.left_out[name] = why
        self.samples = [sample for sample in self.samples if sample.engine != name]

    def _compare_tokens(self) -> None:
        for tokens in self._tokens.values():
            for name, share in summary.agreement(tokens).items():
                if name not in self.left_out:
                    self.agreed.setdefault(name, []).append(share)

    def shares(self) -> dict[str, float]:
        """Return Raydix's shares of the ceilings, from the best rounds."""
        found, config = summary.speeds(self.samples), CONFIGS[self.model]
        single, first = found["single"][RAYDIX], found["first token"][RAYDIX]
        rate = summary.decode_rate(single, first, self.sizes.single)
        job = make_jobs(self.sizes, self.ids, 0)["prefill"]
        seconds = job.num_prompt / found["prefill"][RAYDIX].best
        return {
            "read_gb_per_s": self.ceilings.read / 1e9,
            "gemm_gflop_per_s": self.ceilings.gemm / 1e9,
            "decode_tokens_per_s": rate,
            "decode_share": decode_share(config, WIDTHS[self.settings.precision], rate, self.ceilings),
            "prefill_share": prefill_share(config, job, seconds, self.ceilings),
        }

    def report(self) -> dict[str, Any]:
        """Return the model's entry in the result file."""
        return {
            "versions": self.versions,
            "left_out": self.left_out,
            "settings": {**asdict(self.settings), "model": self.model},
            "workloads": summary.as_json(self.samples),
            "first_token_agreement": {name: sum(all) / len(all) for name, all in self.agreed.items()},
            "ceilings": self.shares(),
            "samples": [asdict(sample) for sample in self.samples],
        }


def _rotated(engines: Sequence[str], number: int) -> list[str]:
    """Rotate the engines, so that another one begins each round."""
    first = number % len(engines)
    return [*engines[first:], *engines[:first]]


def _turns(jobs: dict[str, Job], engines: Sequence[str], together: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield engines and workloads in turn: a workload at every engine, or all workloads at one engine."""
    if together:
        for workload in jobs:
            yield from ((name, [workload]) for name in engines)
    else:
        yield from ((name, list(jobs)) for name in engines)


def show(console: Console, title: str, report: dict[str, Any]) -> None:
    """Print one model's table and the notes below it."""
    versions = report["versions"]
    columns = [f"{name}\n{version}" for name, version in versions.items()]
    table = Table("workload", *columns, "Raydix / best", title=title, title_justify="left")
    for workload, row in report["workloads"].items():
        cells = [_cell(row["engines"].get(name)) for name in versions]
        against = row["ratio"]
        last = "{value:.2f} ({low:.2f}-{high:.2f}) {peer}".format(**against) if against else "-"
        table.add_row(f"{workload}, {row['unit']}", *cells, last)
    console.print(table)
    top = report["ceilings"]
    console.print(
        f"memory is read at {top['read_gb_per_s']:.1f} GB/s, a single stream takes {top['decode_share']:.0%}; "
        f"matrices multiply at {top['gemm_gflop_per_s']:.0f} GFLOP/s, prefill takes {top['prefill_share']:.0%}"
    )
    agreement = ", ".join(f"{name} {share:.0%}" for name, share in report["first_token_agreement"].items())
    console.print(f"first tokens as Raydix's: {agreement or '-'}")
    for why in report["left_out"].values():
        console.print(f"left out: {why}")


def _cell(speed: dict[str, float] | None) -> str:
    return f"{speed['best']:.1f} ({speed['worst']:.1f})" if speed else "-"


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options, checked; argparse ends the program with a usage message when they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--precision", choices=list(WIDTHS), default="bfloat16")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="rounds of each engine (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="an eighth of the work")
    parser.add_argument("--timeout", type=float, default=1800.0, help="longest silence of an engine, in seconds")
    parser.add_argument("--home", type=Path, default=REPOSITORY / ".peers", help="where peers are installed")
    parser.add_argument("--weights", type=Path, default=Path.home() / ".cache" / "raydix-bench", help="for models")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "results" / "compare")
    options = parser.parse_args(arguments)
    if min(options.threads, options.rounds) < 1:
        parser.error("--threads and --rounds must be at least 1")
    return options


def main() -> None:
    options, console = parse_args(), Console()
    options.logs = Path(tempfile.mkdtemp(prefix="raydix-compare-"))
    sizes = QUICK if options.quick else FULL
    results: dict[str, Any] = {}
    for model in options.models:
        directory = str(make_model(model, options.weights))
        settings = Settings(
            directory, options.precision, options.threads, sizes.requests, sizes.max_len, sizes.kv_tokens
        )
        comparison = Comparison(model, settings, sizes, options)
        comparison.run()
        results[model] = comparison.report()
        show(console, f"{model}, {options.precision}, {options.threads} threads", results[model])
    machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    written = {"machine": machine, "sizes": asdict(sizes), "models": results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(written, indent=1) + "\n")
    chart.draw(results, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
