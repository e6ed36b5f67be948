"""Check that streams survive while an application's processes are killed, stopped and cut off under load.

    python -m benchmarks.chaos [--seconds 60] [--seed 0] [--streams 32] [--replicas 3] [--ingresses 2]
                               [--faults kill,kill2,pause,wedge,ingress,cut] [--json benchmarks/results/chaos.json]
    python -m benchmarks.chaos --apart --streams 16     # source, receiver, stall: KV is on its way
    python -m benchmarks.chaos --apart --streams 16 --faults tier     # it goes to files and comes back
    python -m benchmarks.chaos --nodes 3 --replicas 2 --faults node     # several Ray nodes on this machine

Starts the embedded model in a private Ray, records every request's undisturbed answer, and sends it again under
faults, one after another, each followed by recovery. With `--apart`, the undisturbed answers come from an engine
that keeps no KV, and the faults strike where each prompt's KV goes from one replica to another, or, for the fault
`tier`, to files that all replicas share. The
exit code is 1 when a request failed, when a text or a count of tokens differs from the undisturbed one, when an
event came twice, or when KV pages are still held, or in no state, at the end. Clients connect again when their
connection breaks off, and continue their streams.
The program touches only processes that it started. Linux only: it reads, and shuts, other processes' sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from benchmarks.chaos_app import App, Size, started
from benchmarks.chaos_faults import FAULTS as PROCESS_FAULTS
from benchmarks.chaos_faults import REPLACES_ENGINES as REPLACING
from benchmarks.chaos_faults import NotPossible
from benchmarks.chaos_load import Answer, Ask, Outcome, drive, make_asks, prepare
from benchmarks.chaos_transfers import TRANSFER_FAULTS

FAULTS = {**PROCESS_FAULTS, **TRANSFER_FAULTS}
REPLACES_ENGINES = (*REPLACING, "source", "receiver")
NUM_PREAMBLES = 10
"""Length of the prompts with `--apart`, in system prompts of about 50 tokens."""
Known = Sequence[tuple[Ask, Answer]]

SETTLE_S = 300.0
"""Longest wait for the application to recover after a fault."""
DRAIN_S = 120.0
"""Longest wait for the last page to be freed: an engine keeps requests of a lost ingress for 10 s."""


@dataclass(slots=True)
class Injected:
    """One injected fault. Times are in seconds."""

    kind: str
    what: str
    at: float
    """Time since the load began."""
    recovered_s: float | None
    """Time until all replicas were back; None if they were not in time."""


@dataclass(slots=True)
class Report:
    """Results of the whole run. Times are in seconds."""

    began: float = 0.0
    """Clock when the load began."""
    requests: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    reconnects: int = 0
    repeated_events: int = 0
    """Events of streams that came twice."""
    differing: list[str] = field(default_factory=list)
    """Answers that differ from the undisturbed ones."""
    migrations: dict[str, int] = field(default_factory=dict)
    retries: int = 0
    pages_leaked: int = 0
    pages_lost: int = 0
    """Pages of device and host memory that are in no state at the end."""
    moved_pages: dict[str, int] = field(default_factory=dict)
    """KV pages copied to other replicas and to files and back, and those that did not come."""
    gaps: dict[str, float | None] = field(default_factory=dict)
    """Gaps of migrated streams that the ingresses measured, as bounds of histogram buckets."""
    longest_pauses: dict[str, float] = field(default_factory=dict)
    """Longest time between two chunks of a stream, as clients saw them."""
    faults: list[Injected] = field(default_factory=list)
    not_possible: dict[str, str] = field(default_factory=dict)

    @property
    def violations(self) -> list[str]:
        """Return a description of every violated guarantee."""
        return [
            *(f"failed: {what}" for what in self.failures),
            *(f"differs: {what}" for what in self.differing),
            *([f"{self.repeated_events} events came twice"] if self.repeated_events else []),
            *([f"{self.pages_leaked} KV pages leaked"] if self.pages_leaked else []),
            *([f"{self.pages_lost} KV pages lost"] if self.pages_lost else []),
            *(f"not recovered after {fault.what}" for fault in self.faults if fault.recovered_s is None),
        ]


def main() -> None:
    options = _options()
    has_files = options.apart and "tier" in options.faults
    size = Size(options.replicas, options.ingresses, options.nodes, options.apart, has_files)
    known = _cold_answers(options) if options.apart else None
    with started(size) as app:
        report = asyncio.run(_run(app, options, known))
        app.close()
    _print(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(_record(report, options), indent=2) + "\n")
    sys.exit(1 if report.violations else 0)


def _cold_answers(options: argparse.Namespace) -> Known:
    """Return every ask with the answer of an engine that keeps no KV, and fetches none."""
    cold = {"engine": {"prefix_cache": False, "host_kv_gib": 0}}
    with started(Size(replicas=1), cold) as app:
        try:
            return asyncio.run(_answers(app, options))
        finally:
            app.close()


async def _answers(app: App, options: argparse.Namespace) -> Known:
    asks = make_asks(options.asks, options.seed, num_preambles=NUM_PREAMBLES if options.apart else 0)
    async with _connected(app) as client:
        if not await app.until(app.is_whole, SETTLE_S):
            raise RuntimeError(f"the application did not come up: {await app.health()}")
        return await prepare(client, asks, options.streams)


def _connected(app: App) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=app.url, timeout=180, limits=httpx.Limits(max_connections=None))


async def _run(app: App, options: argparse.Namespace, known: Known | None) -> Report:
    report = Report()
    known = known or await _answers(app, options)
    async with _connected(app) as client:
        if not await app.until(app.is_whole, SETTLE_S):
            raise RuntimeError(f"the application did not come up: {await app.health()}")
        stop, report.began = asyncio.Event(), time.monotonic()
        asks = [ask for ask, _ in known]
        load = asyncio.create_task(
            drive(client, asks, stop, at_once=options.streams, rate=options.rate, seed=options.seed)
        )
        await _inject(app, options, report)
        stop.set()
        outcomes = await load
        _judge(report, outcomes, {ask.name: answer for ask, answer in known})
        await _count(app, report)
    return report


async def _inject(app: App, options: argparse.Namespace, report: Report) -> None:
    """Inject one fault after another, in shuffled rounds, until the time is over and `--least` were tried."""
    draw, began = random.Random(options.seed), report.began
    coming: list[str] = []
    num_tried = 0
    while num_tried < options.least or time.monotonic() - began < options.seconds:
        num_tried += 1
        await asyncio.sleep(draw.uniform(0.5, 3.0))
        coming = coming or draw.sample(options.faults, len(options.faults))
        kind = coming.pop()
        before = await app.connected()
        at = time.monotonic()
        try:
            what = await FAULTS[kind](app, draw)
        except NotPossible as reason:
            report.not_possible[kind] = str(reason)
            continue
        if kind in REPLACES_ENGINES:  # Until ingresses notice the fault, all replicas seem connected.
            await app.until(partial(_is_other, app, before), 10.0)
        is_whole = await app.until(app.is_whole, SETTLE_S)
        seconds = time.monotonic() - at if is_whole else None
        report.faults.append(Injected(kind, what, round(at - began, 1), seconds and round(seconds, 1)))


async def _is_other(app: App, before: set[str]) -> bool:
    return await app.connected() != before


def _judge(report: Report, outcomes: Sequence[Outcome], known: dict[str, Answer]) -> None:
    """Classify the outcomes."""
    report.requests = len(outcomes)
    report.by_kind = dict(Counter(_kind(outcome.ask) for outcome in outcomes))
    for outcome in outcomes:
        report.reconnects += outcome.num_reconnects
        report.repeated_events += outcome.num_repeated
        if outcome.answer is None:
            report.failures.append(f"{outcome.ask.name}: {outcome.error}")
        elif outcome.answer != known[outcome.ask.name]:
            report.differing.append(f"{outcome.ask.name}: {_difference(outcome.answer, known[outcome.ask.name])}")
    pauses = [outcome.longest_pause for outcome in outcomes if outcome.chunks]
    report.longest_pauses = {name: round(_percentile(pauses, q), 3) for name, q in _QUANTILES.items()}


def _kind(ask: Ask) -> str:
    return ask.name.split(": ")[1]


def _difference(got: Answer, wanted: Answer) -> str:
    for index, (a, b) in enumerate(zip(got.texts, wanted.texts, strict=False)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return f"choice {index} from character {at}: {a[at : at + 40]!r}, undisturbed {b[at : at + 40]!r}"
    return f"{got.num_tokens} tokens, ends {got.reasons}; undisturbed {wanted.num_tokens}, {wanted.reasons}"


async def _count(app: App, report: Report) -> None:
    """Read the application's metrics after the last request has ended."""

    async def nothing_held() -> bool:
        report.pages_leaked = int(await app.metric("raydix_kv_pages", state="active"))
        return report.pages_leaked == 0

    await asyncio.sleep(2.0)  # processes report once a second
    await app.until(nothing_held, DRAIN_S)
    pages = await app.samples("raydix_kv_pages")
    in_a_state = sum(value for labels, value in pages if labels.get("tier") != "file")  # whose number is not fixed
    report.pages_lost = int(await app.metric("raydix_kv_pages_capacity") - in_a_state)
    for labels, value in await app.samples("raydix_kv_transfer_pages_total"):
        _add(report.moved_pages, f"{labels['tier']} {labels['direction']}", value)
    for labels, value in await app.samples("raydix_kv_transfer_failed_pages_total"):
        _add(report.moved_pages, f"{labels['tier']} failed", value)
    for labels, value in await app.samples("raydix_migrations_total"):
        _add(report.migrations, f"{labels['reason']}, {labels['outcome']}", value)
    report.retries = int(await app.metric("raydix_retries_total"))
    counts: Counter[float] = Counter()
    for labels, value in await app.samples("raydix_migration_gap_seconds_bucket"):
        counts[float(labels["le"])] += int(value)
    total = max(counts.values(), default=0)
    for name, quantile in _QUANTILES.items():
        bounds = [bound for bound in sorted(counts) if total and counts[bound] >= quantile * total]
        report.gaps[name] = bounds[0] if bounds else None


def _add(counts: dict[str, int], key: str, value: float) -> None:
    if value:
        counts[key] = counts.get(key, 0) + int(value)


_QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def _percentile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


# --- output -------------------------------------------------------------------------------------------------


def _print(report: Report) -> None:
    console = Console()
    faults = Table("at", "fault", "recovered after", title="Faults")
    for fault in report.faults:
        recovered = "never" if fault.recovered_s is None else f"{fault.recovered_s:.1f} s"
        faults.add_row(f"{fault.at:.1f} s", fault.what, recovered)
    console.print(faults)
    for kind, reason in report.not_possible.items():
        console.print(f"{kind} was not possible: {reason}")
    result = Table("", "", title="Streams")
    result.add_row("requests", str(report.requests))
    result.add_row("failures (expected 0)", str(len(report.failures)))
    result.add_row("connections broken off, and answers continued", str(report.reconnects))
    result.add_row("events that came twice (expected 0)", str(report.repeated_events))
    result.add_row("answers that differ (expected 0)", str(len(report.differing)))
    result.add_row("migrations", ", ".join(f"{n} {key}" for key, n in sorted(report.migrations.items())) or "0")
    result.add_row("retries before the first token", str(report.retries))
    result.add_row("KV pages leaked or lost (expected 0)", str(report.pages_leaked + abs(report.pages_lost)))
    result.add_row(
        "KV pages moved", ", ".join(f"{n} {key}" for key, n in sorted(report.moved_pages.items())) or "0"
    )
    result.add_row("gap of migrated streams, at most", _times(report.gaps))
    result.add_row("longest pause of any stream", _times(report.longest_pauses))
    console.print(result)
    for violation in report.violations[:20]:
        console.print(violation, style="red", markup=False)


def _times(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.3g} s" for name, value in values.items() if value is not None) or "none"


def _record(report: Report, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "machine": this_machine.described(),
        "violations": report.violations,
        **{name: value for name, value in asdict(report).items() if name != "began"},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults")
    parser.add_argument("--least", type=int, default=0, help="least number of faults, however long recovery takes")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests and faults")
    parser.add_argument("--streams", type=int, default=32, help="requests kept open")
    parser.add_argument("--rate", type=float, default=None, help="requests a second instead, at Poisson times")
    parser.add_argument("--asks", type=int, default=48, help="different requests")
    parser.add_argument("--apart", action="store_true", help="prefill and decode apart")
    parser.add_argument("--replicas", type=int, default=3, help="engine replicas")
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1, help="Ray nodes for engines; more than 1 starts a cluster")
    parser.add_argument("--faults", type=_faults, default=None, help=f"of {','.join(FAULTS)}")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    options = parser.parse_args()
    if options.faults is None:
        possible = {"ingress": options.ingresses > 1, "node": options.nodes > 1, "tier": False}
        faults = TRANSFER_FAULTS if options.apart else PROCESS_FAULTS
        options.faults = [name for name in faults if possible.get(name, True)]
    return options


def _faults(names: str) -> list[str]:
    chosen = names.split(",")
    unknown = sorted(set(chosen) - FAULTS.keys())
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown faults {unknown}: expected some of {sorted(FAULTS)}")
    return chosen


if __name__ == "__main__":
    main()
