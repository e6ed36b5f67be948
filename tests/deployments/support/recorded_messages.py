"""The messages of a release as bytes, which the next release must understand.

    python -m tests.deployments.support.recorded_messages     writes those of this version of the code

Run it once for each release, when its version in pyproject.toml has been set.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from deployments.replica.kv_fetch import messages as kv
from deployments.wire import messages as wire
from engine.grammar.spec import Grammar
from engine.values.beam_search import BeamParams, Hypothesis
from engine.values.logprobs import PackedLogprobs, TokenLogprobs
from engine.values.pooling import Pooling
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta, Timings
from monitoring.metric_table import METRICS
from monitoring.metrics import SNAPSHOT_VERSION, Histogram, Snapshot

ROOT = Path(__file__).resolve().parents[3]
DIRECTORY = ROOT / "tests/deployments/recorded_messages"

_SAMPLED = SamplingParams(
    0.5, 0.75, 40, 0.25, 100, 2, ("stop",), (7,), False, 11, 0.5, 0.25, 1.5, {3: 1.5}, 2, 1, Grammar("regex", "a+")
)
_SEARCHED = SamplingParams(temperature=0.0, max_tokens=5, beams=BeamParams(4, 2, 0.5, "never"))
_POOLED = SamplingParams(max_tokens=1, pooling=Pooling((5,), True))
_LOAD = wire.Load(
    9, 8, 7, 6, 5, 4, 3, 2, 16, 1000.5, 0.5, 500.5, 0.25, True, True, 64, 1.5, (2.5, 3.5), 4.5, "it fails", 1, 2
)
_TIMINGS = Timings(0.5, 0.25, 0.125, 1, 2, 3)
_SCORED = StreamDelta(
    "a",
    [1, 2],
    3,
    4,
    "stop",
    _TIMINGS,
    [TokenLogprobs(1, -0.5, ((2, -1.5),), 1)],
    None,
    PackedLogprobs(1, 0, bytes(8)),
)
_FAILED = StreamDelta("b", finish_reason="error", error="it failed", error_code="step_failed")
_FOUND = StreamDelta(
    "c", [1], finish_reason="length", alternatives=[Hypothesis((1, 2), -0.5, "length")], pooled=b"ab"
)


def wire_messages() -> list[msgspec.Struct]:
    """Return a message of each kind between ingress and replica, with no field at its default."""
    origin = wire.KVOrigin("tcp://a:1", "secret", "key", 5)
    stream = wire.ResumableStream("s", 1, "tenant", b"record", 2.5, 3)
    part = wire.StreamPart(1, "a", 5, b"\2\0\0\0", 3, 4, "length")
    return [
        wire.Hello(wire.WIRE_VERSION, 3, "ingress", "model", {"a": 4}),
        wire.Abort("a"),
        wire.Resume({"a": 4}),
        wire.Resync(True),
        wire.NextPart(True),
        *(
            wire.Generate(
                1, "a", b"\1\0\0\0", each, b"\2\0\0\0", 3, 4, "salt", "tenant", "alone", origin, True, stream
            )
            for each in (_SAMPLED, _SEARCHED, _POOLED)
        ),
        wire.Backlog(1, 2, 3, 4),
        wire.Detach("a"),
        wire.Find("s", "tenant"),
        wire.TakeOver(1, "a"),
        wire.Welcome(1, 2, "replica", "model", 16, 3, wire.WIRE_VERSION),
        wire.Refused("a reason"),
        wire.Unknown(1, 2, ["a"]),
        wire.NotRun(1, 2, "a", "queue_full", "a reason", 2.5),
        wire.Found(1, 2, "s", "tenant", b"record", [part]),
        wire.Tokens(1, 2, [_SCORED, _FAILED, _FOUND], _LOAD),
        wire.Heartbeat(1, 2, _LOAD),
        wire.PrefixSnapshot(1, 2, bytes(8), True, False, b"\1", True),
        wire.PrefixDelta(1, 2, bytes(8), bytes(16), bytes(8), b"\1", True),
    ]


def kv_messages() -> list[msgspec.Struct]:
    """Return a message of each kind between replicas that lend and fetch KV, with no field at its default."""
    region = kv.Region(1, [4096], 512)
    return [
        kv.FetchPages(kv.VERSION, 1, "identity", "model", "salt", b"\1\0\0\0", 2, 3, True),
        kv.More(1, 2),
        kv.Stop(1),
        kv.Check(1, 2, 3),
        kv.Lent(1, 2),
        kv.Page(1, 2, 3),
        kv.End(1, "a reason"),
        kv.Busy(1),
        kv.Readable(1, b"agent", region, [2], region, [3]),
        kv.Held(1, 2, [3]),
    ]


def report() -> Snapshot:
    """Return a process's report to the hub with every metric of the table."""
    values: dict[str, Any] = {}
    histograms: dict[str, Any] = {}
    for metric in METRICS:
        key = tuple("x" for _ in metric.labels)
        if metric.kind == "histogram":
            histograms[metric.name] = [(key, Histogram([1] * (len(metric.buckets) + 1), 1.5))]
        else:
            values[metric.name] = [(key, 1.5)]
    return Snapshot(SNAPSHOT_VERSION, "epoch", 1, "model", "replica", values, histograms)


def kinds() -> Iterator[type[msgspec.Struct]]:
    """Yield the types of all messages of the wire and of KV transfers."""
    for group in (wire.ToReplica, wire.ToIngress, kv.ToSender, kv.ToFetcher):
        yield from get_args(group)


def main() -> None:
    """Write the messages of this version."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    recorded = {
        "wire": [wire.encode(message).hex() for message in wire_messages()],
        "kv": [kv.encode(message).hex() for message in kv_messages()],
        "report": msgspec.msgpack.encode(report()).hex(),
    }
    DIRECTORY.mkdir(exist_ok=True)
    (DIRECTORY / f"{version}.json").write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
