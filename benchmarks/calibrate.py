"""Calibrate the simulator: measure an engine's prefill rate, and the time of a decode step by batch size.

    python -m benchmarks.calibrate [MODEL] [--out benchmarks/results/service_model.json]
    raydix simulate TRACE --calibration benchmarks/results/service_model.json

Runs a model (by default the embedded one) in this process through the offline API, and uses no prefix twice.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deployments.simulator.fleet.service import ServiceModel
from engine.program.llm import LLM
from engine.values.sampling_params import SamplingParams

BATCHES = (1, 2, 4, 8, 16)
DECODE_TOKENS = 48
REPEATS = 5
"""Repetitions, of which the fastest counts, because other work on the machine only adds time."""


def main() -> None:
    options = _options()
    llm = LLM(options.model, prefix_cache=False)
    rng = random.Random(0)
    _prefill_rate(llm, rng, options.prompt_tokens)  # the first call of each kind is slow
    _step_seconds(llm, rng, 1)
    rate = max(_prefill_rate(llm, rng, options.prompt_tokens) for _ in range(REPEATS))
    steps = {batch: _step_seconds(llm, rng, batch) for batch in BATCHES}
    slope, base = statistics.linear_regression(list(steps), list(steps.values()))
    service = ServiceModel(
        prefill_rate=round(rate, 1), decode_base_s=max(base, 1e-6), decode_per_request_s=max(slope, 0.0)
    )
    _print(service, steps)
    report = {
        "service": asdict(service),
        "model": options.model,
        "prompt_tokens": options.prompt_tokens,
        "step_seconds": steps,
        "machine": {"platform": platform.machine(), "python": platform.python_version()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


def _prompt(llm: LLM, rng: random.Random, num_tokens: int) -> list[int]:
    """Return random tokens, so that no two prompts share a prefix."""
    size = llm.engine.model.vocab_size
    return [rng.randrange(size) for _ in range(num_tokens)]


def _prefill_rate(llm: LLM, rng: random.Random, num_tokens: int) -> float:
    """Measure prompt tokens/s of a few prompts that arrive together."""
    prompts = [_prompt(llm, rng, num_tokens) for _ in range(4)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return len(prompts) * num_tokens / (time.perf_counter() - began)


def _step_seconds(llm: LLM, rng: random.Random, batch: int) -> float:
    """Measure seconds of a decode step with `batch` short requests: long answers' time less that of one token."""
    one, many = (_fastest(llm, rng, batch, num_tokens) for num_tokens in (1, 1 + DECODE_TOKENS))
    return (many - one) / DECODE_TOKENS


def _fastest(llm: LLM, rng: random.Random, batch: int, num_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    seconds = []
    for _ in range(REPEATS):
        prompts = [_prompt(llm, rng, 32) for _ in range(batch)]
        began = time.perf_counter()
        llm.generate(prompts, params, progress=False)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _print(service: ServiceModel, steps: dict[int, float]) -> None:
    table = Table(title=f"prefill: {service.prefill_rate:,.0f} tokens/s", title_justify="left")
    for heading in ("requests decoding", "step measured, ms", "fitted, ms"):
        table.add_column(heading, justify="right")
    for batch, seconds in steps.items():
        table.add_row(str(batch), f"{seconds * 1000:.2f}", f"{service.step_seconds(batch) * 1000:.2f}")
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo", help="a directory, a hub id or demo")
    parser.add_argument("--prompt-tokens", type=int, default=400, help="prompt length for the prefill rate")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/service_model.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
