"""Besiege the application: attackers of all kinds at once, beside honest streams that must not notice.

    python -m benchmarks.siege [--seconds 600] [--seed 0] [--streams 16] [--json benchmarks/results/siege.json]
    python -m benchmarks.siege --turns 1         # each attack of each attacker once, however long that takes

Starts the embedded model in a private Ray (two ingresses, three engines), computes the answers of the honest
requests in peace, and lets all attackers loose, which is a tenant, strangers and accidents. The exit code is 1
when an honest stream differs in a token or fails, also with its ingress; when its connection breaks off for
another reason; when a bound is broken; when an attacker gets an answer that breaks a promise; or when anything is
held at the end.
The program touches only processes that it started. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from benchmarks.attackers.base import Attacker
from benchmarks.attackers.bodies import Bodies
from benchmarks.attackers.cancels import Cancels
from benchmarks.attackers.clocks import Clocks
from benchmarks.attackers.floods import Floods
from benchmarks.attackers.kills import Kills
from benchmarks.attackers.metrics_port import MetricsStrangers
from benchmarks.attackers.random_requests import RandomRequests
from benchmarks.attackers.readers import Readers
from benchmarks.attackers.wire import WireStrangers
from benchmarks.chaos_app import Size
from benchmarks.siege_app import Outage, Target, authorization, besieged
from benchmarks.siege_leaks import leaked, sizes
from benchmarks.siege_streams import Ask, Broken, Tally, honest, in_peace, make_asks
from benchmarks.siege_watch import Seen, Watch

ATTACKERS: tuple[type[Attacker], ...] = (
    RandomRequests, Bodies, Floods, Readers, Cancels, WireStrangers, MetricsStrangers, Kills, Clocks,
)  # fmt: skip
TELL_S = 20.0
SETTLE_S = 300.0
"""Longest wait for the application to be whole."""


@dataclass(slots=True)
class Report:
    """The results of the whole siege."""

    seconds: float = 0.0
    """From the first attack to the end of the last honest stream."""
    streams: Tally = field(default_factory=Tally)
    continued: int = 0
    """Connections of honest streams whose ingress was killed; each stream was continued."""
    failed: list[str] = field(default_factory=list)
    """Connections of honest streams that broke off although their ingress lived."""
    seen: Seen = field(default_factory=Seen)
    rounds: dict[str, int] = field(default_factory=dict)
    attacks: dict[str, dict[str, int]] = field(default_factory=dict)
    outages: list[Outage] = field(default_factory=list)
    broken_promises: list[str] = field(default_factory=list)
    """What attackers got that they must not."""
    leaked: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """Return a description of every violated guarantee."""
        return [
            *(f"wrong stream: {what}" for what in self.streams.wrong),
            *(f"failed stream: {what}" for what in self.failed),
            *(f"broken promise: {what}" for what in self.broken_promises),
            *(f"beyond its bound: {what}" for what in self.seen.beyond),
            *(f"leaked: {what}" for what in self.leaked),
        ]


def main() -> None:
    """Besiege, print what came of it, and write it."""
    options = _options()
    with besieged(Size(options.engines, options.ingresses), options.connections) as target:
        report = asyncio.run(_run(target, options))
    _print(report)
    if options.json:
        options.json.write_text(json.dumps(_record(report, options), indent=1) + "\n")
    sys.exit(1 if report.violations else 0)


async def _run(target: Target, options: argparse.Namespace) -> Report:
    report = Report()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=target.app.url, headers=authorization("honest"), timeout=300, limits=limits
    ) as client:
        if not await target.app.until(target.app.is_whole, SETTLE_S):
            raise RuntimeError(f"the application did not come up: {await target.app.health()}")
        asks = await in_peace(client, make_asks(options.asks, options.seed))
        await _warm_up(client, options.ingresses)
        at_rest = await asyncio.to_thread(sizes, target)
        watch = Watch(target)
        watch.start()
        attackers = [kind(target, options.seed) for kind in options.attackers]
        began = time.monotonic()
        await _fight(client, asks, attackers, report.streams, options)
        report.seconds = round(time.monotonic() - began, 1)
        await watch.stop()
        report.seen = watch.seen
    report.leaked = await leaked(target, at_rest)
    _judge(report, target, attackers)
    return report


async def _warm_up(client: httpx.AsyncClient, num_ingresses: int) -> None:
    """Have what is started once and kept started in every ingress: the threads, and the processes for grammars."""
    for number in range(8 * num_ingresses):
        body = {"model": "demo", "prompt": f"{number} " * 20_000, "structured_outputs": {"regex": f"a{number}"}}
        await client.post("/v1/completions", json=body, headers={"connection": "close"})


async def _fight(
    client: httpx.AsyncClient,
    asks: Sequence[Ask],
    attackers: Sequence[Attacker],
    tally: Tally,
    options: argparse.Namespace,
) -> None:
    """Attack until the time is over, or the turns are; then let the last honest streams end."""
    ends_at = time.monotonic() + options.seconds
    num_attacking = len(attackers)

    def is_over(attacker: Attacker) -> bool:
        if options.turns:
            return attacker.num_rounds >= int(options.turns) * attacker.num_kinds
        return time.monotonic() >= float(ends_at)

    async def attack(attacker: Attacker) -> None:
        nonlocal num_attacking
        await attacker.attack(is_over)
        num_attacking -= 1

    telling = asyncio.create_task(_tell(attackers, tally))
    async with asyncio.TaskGroup() as group:
        for number in range(options.streams):
            draw = random.Random(f"{options.seed} stream {number}")
            group.create_task(honest(client, asks, tally, draw, lambda: num_attacking == 0))
        for attacker in attackers:
            group.create_task(attack(attacker))
    telling.cancel()


async def _tell(attackers: Sequence[Attacker], tally: Tally) -> None:
    """Say now and then how far it is, and what has gone wrong since."""
    began = time.monotonic()
    num_told = 0
    while True:
        await asyncio.sleep(TELL_S)
        doing = ", ".join(f"{attacker.name}: {attacker.doing}" for attacker in attackers if attacker.doing)
        faults = sorted([*tally.wrong, *(what for attacker in attackers for what in attacker.wrong)])
        told = f"{time.monotonic() - began:4.0f} s  {tally.num_whole} streams, {len(faults)} faults"
        print(f"{told}  {doing}", *faults if len(faults) > num_told else (), sep="\n  ", flush=True)
        num_told = len(faults)


def _judge(report: Report, target: Target, attackers: Sequence[Attacker]) -> None:
    report.outages = target.outages
    for stream in report.streams.broken:
        if lost_its_ingress(stream, target.outages):
            report.continued += 1
        else:
            report.failed.append(f"{stream.name}: {stream.error}")
    for attacker in attackers:
        report.rounds[attacker.name] = attacker.num_rounds
        report.attacks[attacker.name] = dict(sorted(attacker.counts.items()))
        report.broken_promises += [f"{attacker.name}: {what}" for what in attacker.wrong]


def lost_its_ingress(stream: Broken, outages: Sequence[Outage]) -> bool:
    """Whether an ingress was killed, and not replaced yet, while the stream was open."""
    return any(
        outage.kind == "ingress" and stream.began <= outage.ended and stream.ended >= outage.began
        for outage in outages
        if outage.how == "killed"
    )


# --- output -------------------------------------------------------------------------------------------------


def _print(report: Report) -> None:
    console = Console()
    attacks = Table("attacker", "rounds", "what it did", title="Attacks")
    for name, rounds in report.rounds.items():
        what = ", ".join(f"{count} {kind}" for kind, count in report.attacks[name].items())
        attacks.add_row(name, str(rounds), what)
    console.print(attacks)
    result = Table("", "", title=f"Honest streams in {report.seconds:.0f} s")
    result.add_row("whole and right", f"{report.streams.num_whole} ({report.streams.num_tokens} tokens)")
    result.add_row("wrong (expected 0)", str(len(report.streams.wrong)))
    result.add_row("failed (expected 0)", str(len(report.failed)))
    result.add_row("broken off with a killed ingress, and continued", str(report.continued))
    result.add_row("longest pause of a stream", f"{report.streams.longest_pause_s:.1f} s")
    result.add_row("longest delay of an ingress's loop", f"{report.seen.loop_lag_s * 1000:.0f} ms")
    result.add_row("longest by its own work", f"{report.seen.own_lag_s * 1000:.0f} ms")
    result.add_row("most memory of a process, MiB", ", ".join(f"{k} {v}" for k, v in report.seen.rss_mib.items()))
    result.add_row("held at the end (expected nothing)", ", ".join(report.leaked) or "nothing")
    console.print(result)
    for violation in report.violations[:40]:
        console.print(violation, style="red", markup=False)


def _record(report: Report, options: argparse.Namespace) -> dict[str, Any]:
    kept = {name: value for name, value in vars(options).items() if name not in ("json", "attackers")}
    return {
        "options": {**kept, "attackers": [kind.name for kind in options.attackers]},
        "machine": this_machine.described(),
        "violations": report.violations,
        **asdict(report),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no attacker begins a round")
    parser.add_argument("--turns", type=int, default=0, help="times of each kind of attack, instead of a time")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests and attacks")
    parser.add_argument("--streams", type=int, default=16, help="honest streams kept open")
    parser.add_argument("--connections", type=int, default=100, help="connections of each flood")
    parser.add_argument("--asks", type=int, default=24, help="different honest requests")
    parser.add_argument("--engines", type=int, default=3, help="engine replicas")
    parser.add_argument("--ingresses", type=int, default=2)
    parser.add_argument("--attackers", type=_attackers, default=ATTACKERS, help=f"of {','.join(_names())}")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    return parser.parse_args()


def _names() -> list[str]:
    return [kind.name for kind in ATTACKERS]


def _attackers(names: str) -> tuple[type[Attacker], ...]:
    chosen = names.split(",")
    unknown = sorted(set(chosen) - set(_names()))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown attackers {unknown}: expected some of {_names()}")
    return tuple(kind for kind in ATTACKERS if kind.name in chosen)


if __name__ == "__main__":
    main()
