"""Measure what requests that decode after the same prefix save by attending to it together.

    python -m benchmarks.cascade_attention [--rounds 12] [--json benchmarks/results/cascade_attention.json]

Attention: of one layer of Qwen3-0.6B, for rows after one prefix with 64 positions of their own. Step: whole
decode steps in bfloat16, sampling included, of two engines with that model's shape and random weights, whose
requests have 16 tokens of their own. Both arms, `engine.cascade_attention` off and auto, take turns in a process;
each keeps its best call or step, as other processes can only add time. One thread, in processor time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from benchmarks import this_machine
from benchmarks.native_attention import CPU
from benchmarks.peers.models import FIRST_WORD, make_model
from cache import Namespace
from engine.attention.base import AttentionShape
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import KVPages
from engine.attention.native import NativeAttention
from engine.kernels import native
from engine.program.engine import Engine
from engine.settings.config import Cascade, EngineConfig
from engine.values.plan import Chunk
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS, PREFIXES = (2, 8, 32), (512, 1024, 4096)
OWN, PAGE_SIZE, LAYERS = 64, 16, 4
STEP_ROWS, STEP_PREFIX, STEP_OWN = 32, 4096, 16
T = TypeVar("T")
ARMS: tuple[Cascade, ...] = ("off", "auto")


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = {
        "machine": this_machine.described() | {"isa": native.kernels(torch.bfloat16).isa},
        "rounds": options.rounds,
        "attention": [
            attention(dtype, rows, prefix, options.rounds)
            for dtype, rows, prefix in itertools.product(DTYPES, ROWS, PREFIXES)
        ],
        "step": step(options.rounds),
    }
    Console().print_json(data=result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def attention(dtype: str, rows: int, prefix: int, rounds: int) -> dict[str, Any]:
    """Return the best microseconds of a layer's attention by arm, and whether the results are equal."""
    shared, own = prefix // PAGE_SIZE, OWN // PAGE_SIZE
    pages = KVPages(LAYERS, shared + rows * own, PAGE_SIZE, 8, 128, DTYPES[dtype], CPU)
    for layer in pages.data:
        layer.normal_()
    order = torch.randperm(pages.num_pages).tolist()
    tables = [order[:shared] + order[shared + row * own :][:own] for row in range(rows)]
    request = Request.make("r", [0], SamplingParams(), arrival=0.0, seed=0, namespace=Namespace("m"))
    chunks = [Chunk(request, prefix + OWN - 1, 1, [0], table, samples=True) for table in tables]
    batch = AttentionBatch.from_chunks(chunks, PAGE_SIZE, pages.null_page)
    shape = AttentionShape(16, 8, 128, PAGE_SIZE, frozenset({None}))
    steps = {
        arm: NativeAttention(replace(shape, is_cascade=arm == "auto")).prepare(batch, pages.null_page)
        for arm in ARMS
    }
    query = torch.randn(rows, 16, 128).to(DTYPES[dtype])
    best, found = dict.fromkeys(ARMS, float("inf")), {}
    for layer in [*range(LAYERS)] * (rounds + 1):
        for arm, one in steps.items():
            seconds, found[arm] = _timed(partial(one.attend, pages.layer(layer), query, None))
            best[arm] = min(best[arm], seconds)
    us = {arm: round(seconds * 1e6, 1) for arm, seconds in best.items()}
    equal = torch.equal(found["off"], found["auto"])
    return {"dtype": dtype, "rows": rows, "prefix": prefix, "us": us, "equal": equal}


def step(rounds: int) -> dict[str, Any]:
    """Return the milliseconds of whole decode steps by arm, and whether all tokens are equal."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_model("qwen3-0.6b", Path(directory))
        engines = {arm: decoding(model, arm, rounds) for arm in ARMS}
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        tokens: dict[str, list[tuple[str, list[int]]]] = {arm: [] for arm in ARMS}
        for _ in range(rounds):
            for arm, engine in engines.items():
                took, deltas = _timed(engine.loop.step)
                assert len(deltas) == STEP_ROWS, "every request decodes"
                seconds[arm].append(took)
                tokens[arm] += sorted((delta.request_id, list(delta.token_ids)) for delta in deltas)
    return {
        "rows": STEP_ROWS,
        "prefix": STEP_PREFIX,
        "best_ms": {arm: round(min(took) * 1e3, 1) for arm, took in seconds.items()},
        "median_ms": {arm: round(statistics.median(took) * 1e3, 1) for arm, took in seconds.items()},
        "equal": tokens["off"] == tokens["auto"],
    }


def decoding(model: Path, arm: Cascade, rounds: int) -> Engine:
    """Return an engine whose requests all decode after one prefix."""
    pages = STEP_PREFIX // PAGE_SIZE + STEP_ROWS * (2 + (STEP_OWN + rounds) // PAGE_SIZE)
    limit = STEP_PREFIX + STEP_OWN + rounds + 8
    config = EngineConfig(
        model=str(model), device="cpu", dtype="bfloat16", threads=1, page_size=PAGE_SIZE, kv_pages=pages,
        max_model_len=limit, max_step_ms=None, overlap=False, cascade_attention=arm,
    )  # fmt: skip
    engine, draw = Engine.from_config(config), random.Random(1)
    sampling = SamplingParams(temperature=0, max_tokens=rounds + 4, ignore_eos=True)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(FIRST_WORD, 150_000) for _ in range(length)]

    prefix = prompt(STEP_PREFIX)
    engine.loop.submit(engine.new_request("prefix", [*prefix, 1], replace(sampling, max_tokens=1)))
    while engine.loop.has_work:
        engine.loop.step()
    for row in range(STEP_ROWS):
        engine.loop.submit(engine.new_request(str(row), prefix + prompt(STEP_OWN), sampling))
    started: set[str] = set()
    while len(started) < STEP_ROWS:
        started |= {delta.request_id for delta in engine.loop.step() if delta.token_ids}
    return engine


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.process_time()
    found = call()
    return time.process_time() - began, found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
