"""Measure a step's work beside the model: choosing tokens, what their requests ask for, and preparing the batch.

    python -m benchmarks.sampling [--rows 1 32 256] [--vocabularies 4096 32000 151936] [--threads N] [--json FILE]

Samplers: from float32 logits, normally distributed with a deviation of 3, to tokens as Python's numbers, by the
native kernels and by torch. Steps: decoding on the embedded model's runner with a decoder that computes nothing;
"prepare" is done while the previous step runs, "run" is the rest: inputs, greedy sampling, result.

Penalties: a token by the native kernels, with a vocabulary of 151,936, of a request with so many tokens before
it; the first one counts them all. Stop strings: the text of a token, of docstrings or of what may always begin a
stop string. Grammars: a mask of the embedded model's 4,096 tokens, along answers drawn by chance, when the grammar
was just compiled and when all of these answers were given before. Times are the best of many in microseconds, to
exclude other work on the machine; those of stop strings and grammars are means over their texts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.token_options import grammars, penalties, stop_strings
from cache import Namespace
from engine.loading.load_model import load_model
from engine.models.decoder import Decoder
from engine.runner.model_runner import ModelRunner
from engine.sampling.sampler import Sampler, sampler_for
from engine.settings.config import EngineConfig
from engine.values.plan import Chunk, StepPlan
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from engine.values.sampling_row import SamplingRow

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 50": {"top_k": 50},
}
SECONDS = 0.5
NUM_PROMPT = 100
PAGE_SIZE = 16


class NoDecoder:
    """A decoder that returns the same hidden states and logits each time."""

    def __init__(self, runner: ModelRunner, num_rows: int) -> None:
        config = runner.model_config
        self._hidden, self._logits = (
            torch.zeros(num_rows, config.hidden_size),
            torch.randn(num_rows, config.vocab_size),
        )

    def __call__(self, *inputs: object) -> torch.Tensor:
        return self._hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits


def requests(num_rows: int, **sampling: Any) -> list[Request]:
    """Return requests that have a prompt and one token of output."""
    params = SamplingParams(max_tokens=1000, **sampling)
    space, prompt = Namespace("m"), range(NUM_PROMPT)
    return [
        Request.make(str(seed), prompt, params, arrival=0.0, seed=seed, namespace=space, output_ids=[7])
        for seed in range(num_rows)
    ]


def best(*parts: Callable[[], object]) -> list[float]:
    """Return the best microseconds of each part; the parts are called in turn."""
    least = [float("inf")] * len(parts)
    until, rounds = time.perf_counter() + SECONDS * len(parts), 0
    while time.perf_counter() < until or rounds < 3:
        for index, part in enumerate(parts):
            begin = time.perf_counter()
            part()
            least[index] = min(least[index], time.perf_counter() - begin)
        rounds += 1
    return [round(seconds * 1e6, 1) for seconds in least]


def measure_samplers(num_rows: int, vocab_size: int, kind: str) -> dict[str, float]:
    """Measure both samplers on the same logits, in turn."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    rows = [SamplingRow.of(request) for request in requests(num_rows, **KINDS[kind])]
    native, plain = sampler_for((), torch.device("cpu")), Sampler(())
    times = best(lambda: native.sample(logits, rows)[0].tolist(), lambda: plain.sample(logits, rows)[0].tolist())
    return {"native_us": times[0], "torch_us": times[1], "ratio": round(times[1] / times[0], 1)}


def measure_steps(num_rows: int) -> dict[str, float]:
    """Measure steps in which every request decodes the token that the previous step sampled."""
    runner = load_model(EngineConfig(model="demo", kv_pages=num_rows * 8, page_size=PAGE_SIZE))
    runner.decoder = cast("Decoder", NoDecoder(runner, num_rows))
    chunks = tuple(
        Chunk(request, NUM_PROMPT, 1, (-1,), range(number * 8, number * 8 + 8), True)
        for number, request in enumerate(requests(num_rows, temperature=0.0))
    )
    prepared = [runner.prepare(StepPlan(chunks))]

    def prepare() -> None:
        prepared.append(runner.prepare(StepPlan(chunks)))

    times = best(prepare, lambda: prepared.pop(0)())
    return {"prepare_us": times[0], "run_us": times[1], "together_us": round(sum(times), 1)}


def _shown(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    shown = []
    for row in rows:
        print(row, flush=True)
        shown.append(row)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[4096, 32_000, 151_936])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps, samplers = [], []
    for num_rows in options.rows:
        steps.append({"rows": num_rows, **measure_steps(num_rows)})
        print("step", steps[-1], flush=True)
    for vocab_size in options.vocabularies:
        for num_rows in options.rows:
            for kind in KINDS:
                found = measure_samplers(num_rows, vocab_size, kind)
                samplers.append({"vocabulary": vocab_size, "rows": num_rows, "kind": kind, **found})
                print("sampler", samplers[-1], flush=True)
    asked = {section.__name__: _shown(section()) for section in (penalties, stop_strings, grammars)}
    if options.json:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": options.threads}
        document = {"machine": machine, "steps": steps, "samplers": samplers, **asked}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
