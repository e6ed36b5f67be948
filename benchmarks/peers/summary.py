"""What the rounds come to: every engine's best, how far rounds lie apart, and Raydix against the best peer.

Other work on the machine only takes time away, so the best round is the nearest to the truth; how far the ratio of
each round strays from that of the bests says how far to believe it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.peers.process import RAYDIX
from benchmarks.peers.protocol import Job

UNITS = {"first token": "ms", "prefill": "prompt tok/s"}
"""Units of workloads that are not measured in output tokens per second."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine on one workload in one round. Speeds are better when higher."""

    engine: str
    workload: str
    round: int
    seconds: float
    speed: float


def speed(workload: str, job: Job, seconds: float) -> float:
    """Output tokens a second; prompt tokens for "prefill"; for "first token" how often a second."""
    return (job.num_prompt if workload == "prefill" else job.num_output) / seconds


def shown(workload: str, value: float) -> float:
    """A speed as it is printed: "first token" as milliseconds."""
    return 1e3 / value if workload == "first token" else value


@dataclass(frozen=True, slots=True)
class Speed:
    """Speeds of one engine over all rounds."""

    best: float
    worst: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Speed:
        speeds = [sample.speed for sample in samples]
        return cls(max(speeds), min(speeds))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Raydix's speed over that of the best peer; above 1 Raydix is faster."""

    peer: str
    value: float
    """Ratio of the best rounds."""
    low: float
    """Lowest ratio of a round, against the peer that is best over all rounds."""
    high: float


def speeds(samples: Sequence[Sample]) -> dict[str, dict[str, Speed]]:
    """By workload and engine, in the order in which they first ran."""
    found: dict[str, dict[str, list[Sample]]] = {}
    for sample in samples:
        found.setdefault(sample.workload, {}).setdefault(sample.engine, []).append(sample)
    return {
        workload: {engine: Speed.of(those) for engine, those in engines.items()}
        for workload, engines in found.items()
    }


def ratio(samples: Sequence[Sample], workload: str) -> Ratio | None:
    """Raydix against the best peer; None where either is missing."""
    by_engine = speeds(samples).get(workload, {})
    peers = {name: found for name, found in by_engine.items() if name != RAYDIX}
    if RAYDIX not in by_engine or not peers:
        return None
    peer = max(peers, key=lambda name: peers[name].best)
    ours, theirs = (_by_round(samples, workload, name) for name in (RAYDIX, peer))
    each = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]
    value = by_engine[RAYDIX].best / peers[peer].best
    return Ratio(peer, value, min(each, default=value), max(each, default=value))


def _by_round(samples: Sequence[Sample], workload: str, engine: str) -> dict[int, float]:
    return {one.round: one.speed for one in samples if (one.workload, one.engine) == (workload, engine)}


def decode_rate(single: Speed, first: Speed, num_tokens: int) -> float:
    """Tokens per second of a single stream after its first token, from the best rounds."""
    return (num_tokens - 1) / max(num_tokens / single.best - 1 / first.best, 1e-9)


def agreement(tokens: Mapping[str, list[list[int]]]) -> dict[str, float]:
    """For each peer, the share of a job's answers whose first token is Raydix's: the same model answers.

    Near 1 in float32; in bfloat16 less, as rounding decides between likely tokens of random weights.
    """
    ours = [answer[0] for answer in tokens[RAYDIX]]
    return {
        name: sum(answer[0] == first for answer, first in zip(answers, ours, strict=True)) / len(ours)
        for name, answers in tokens.items()
        if name != RAYDIX
    }


def as_json(samples: Sequence[Sample]) -> dict[str, Any]:
    """The summary for the result file: by workload, every engine's best and worst, and the ratio."""
    found: dict[str, Any] = {}
    for workload, engines in speeds(samples).items():
        unit = UNITS.get(workload, "tok/s")
        row: dict[str, Any] = {
            name: {"best": round(shown(workload, of.best), 3), "worst": round(shown(workload, of.worst), 3)}
            for name, of in engines.items()
        }
        against = ratio(samples, workload)
        found[workload] = {"unit": unit, "engines": row, "ratio": against and asdict(against)}
    return found
