"""Measures several GPUs: how they are linked, sums over them, and models that they share. CPUs stand in for them.

Each rank draws weights of its own, so what a model computes has no meaning: the tests of ranks compare tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_sections.limits import Bytes, Limits, Rates
from benchmarks.gpu_sections.messages import Inapplicable, Measurement
from benchmarks.gpu_sections.random_model import random_decoder
from benchmarks.gpu_sections.shapes import Size
from benchmarks.gpu_sections.workload import Workload

_NUM_CPU_RANKS = 2


def require_several(device: torch.device) -> int:
    """Return the number of GPUs, or of ranks on a CPU. Raises Inapplicable for one, or without what ranks need."""
    if find_spec("msgspec") is None:
        raise Inapplicable("msgspec, which ranks need, is not installed")
    found = torch.cuda.device_count() if device.type == "cuda" else _NUM_CPU_RANKS
    if found < 2:
        raise Inapplicable("there is one GPU")
    return found


def links(device: torch.device) -> Iterator[Measurement]:
    """Yield how GPUs reach each other, and the time of sums of several sizes over all of them."""
    count = require_several(device)
    if device.type == "cuda":
        yield from _topology(count)
    from engine.parallel.collective import open_store

    store, port = open_store(count + 1)  # kept until the ranks have ended
    command = [sys.executable, "-m", "benchmarks.gpu_sections.rank_sums", device.type, str(count), str(port)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE if rank == 0 else sys.stderr, text=True)
        for rank in range(count)
    ]
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        yield Measurement(**json.loads(line))
    codes = [rank.wait() for rank in ranks]
    del store
    if any(codes):
        raise RuntimeError(f"ranks ended with status {', '.join(map(str, codes))}")


def _topology(count: int) -> Iterator[Measurement]:
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    said = f"{count} GPUs; " + (
        f"without access to each other: {apart}" if apart else "each reads all others' memory"
    )
    yield Measurement("links", by="torch", note=said)
    try:
        told = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return
    yield from (Measurement("links", by="driver", note=line) for line in told.stdout.splitlines()[: count + 1])


def on_ranks(
    model: str,
    raw: Mapping[str, Any],
    settings: Mapping[str, Any],
    sizes: Mapping[str, Any],
    rates: Rates,
    num_bytes: Bytes,
    work: Workload,
    directory: Path,
) -> Iterator[Measurement]:
    """Yield decodes and prompts of a model on several ranks, as shares of what all of them allow.

    sizes: how they share it, as settings of an engine
    """
    from benchmarks.gpu_sections.engine_runs import Runs
    from engine.loading.load_model import load_model
    from engine.program.engine import Engine
    from engine.settings.config import EngineConfig

    (directory / "config.json").write_text(json.dumps(dict(raw)))
    config = EngineConfig(model=str(directory), max_step_ms=None, max_step_stretch=None, **{**settings, **sizes})
    with patch("engine.ranks.load_on_ranks.load_model", partial(load_model, load_weights=random_decoder)):
        engine = Engine.from_config(config, launcher=random_ranks())
    count = config.num_ranks
    limits = Limits(Size.of(raw), _times(rates, count), num_bytes)
    named = ", ".join(f"{name} {value}" for name, value in sizes.items())
    with closing(engine):
        runs = Runs(model, engine, limits, work)
        for part in (runs.decode, runs.prefill):
            for line in part():
                yield replace(line, what=f"{line.what}, {named}", aim=None)


def _times(rates: Rates, count: int) -> Rates:
    """Return the rates of so many GPUs together."""
    told = (rates.bandwidth, rates.matmul, rates.sheet_bandwidth, rates.sheet_matmul)
    return Rates(*(None if rate is None else count * rate for rate in told))  # type: ignore[arg-type]


def random_ranks() -> Any:
    """Return a launcher of ranks with random weights (`random_rank.py`)."""
    import msgspec

    from engine.ranks.launcher import ChildProcesses, LocalProcesses, RankSpec

    class RandomRanks(LocalProcesses):
        def launch(self, specs: Sequence[RankSpec]) -> ChildProcesses:
            children = ChildProcesses()
            for spec in specs:
                command = [sys.executable, "-m", "benchmarks.gpu_sections.random_rank"]
                child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=dict(os.environ))
                children.processes.append(child)
                assert child.stdin is not None
                with child.stdin as pipe:
                    pipe.write(msgspec.msgpack.encode(spec))
            return children

    return RandomRanks()
