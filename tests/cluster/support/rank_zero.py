"""Rank 0 of a pipeline whose other ranks a test starts on other hosts: it prints events, and reads orders.

rank 0 ── {"spec": ...}, {"up": true}, {"tokens": ...}, {"lost": ...} ──▶ test ── a number of tokens, "close" ──▶
"""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.parallel.rank_network import RankNetwork
from engine.program.engine import Engine
from engine.ranks.launcher import ChildProcesses, RankSpec
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import StreamDelta


class ByTheTest:
    """Prints what a rank is started with."""

    shares_gpus = True

    def __init__(self, host: str, lost_after_s: float) -> None:
        self.network = RankNetwork(host, lost_after_s)

    def launch(self, specs: Sequence[RankSpec]) -> ChildProcesses:
        """Implement `WorkerLauncher`."""
        for spec in specs:
            say(spec=b64encode(msgspec.msgpack.encode(spec)).decode())
        return ChildProcesses()


def say(**what: Any) -> None:
    """Print an event."""
    print(json.dumps(what), flush=True)


def main(size: str, host: str, lost_after_s: str, interface: str) -> None:
    """Serve the test."""
    config = EngineConfig(
        device="cpu", kv_pages=64, threads=1, pipeline_parallel_size=int(size), rank_interface=interface or None
    )
    try:
        engine = Engine.from_config(config, launcher=ByTheTest(host, float(lost_after_s)))
    except ValueError as error:
        say(refused=str(error))
        return
    done: list[int] = []

    def on_events(events: list[StreamDelta]) -> None:
        for event in events:
            done.extend(event.token_ids)
            say(tokens=done, is_over=event.finish_reason is not None)

    engine.loop.start(on_events, lambda stats: None, lambda reason: say(lost=reason))
    say(up=True)
    for number, line in enumerate(sys.stdin):
        if line == "close\n":
            engine.close()
            say(closed=True)
            break
        done.clear()
        params = SamplingParams(temperature=0, max_tokens=int(line), ignore_eos=True)
        engine.loop.submit(engine.new_request(str(number), list(range(5, 25)), params))


if __name__ == "__main__":
    main(*sys.argv[1:])
