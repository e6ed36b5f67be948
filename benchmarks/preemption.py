"""Measure preemption: requests that need ten times the KV memory, in each mode and with enough memory.

    python -m benchmarks.preemption [--rounds 3] [--json FILE]

All requests arrive at once; the modes take turns, round by round, on the same model, and every output must equal
that of the run with enough memory. The models are the embedded one, and a random one whose computation costs more.
Seconds are the process's CPU seconds, which other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.sampling_params import SamplingParams

MODES = ("recompute", "swap", "auto")
OVERCOMMITTED = 10
PAGE_SIZE = 16
HOST_GIB = 1.0


@contextmanager
def random_model() -> Iterator[str]:
    """Yield a directory with a Llama-shaped model of 14M random parameters."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=2048,
    )
    with tempfile.TemporaryDirectory() as directory:
        transformers.LlamaForCausalLM(config).save_pretrained(directory)
        yield directory


def workload(num_requests: int, vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of 60 to 200 tokens without shared prefixes, and answers' settings of 40 to 140 tokens."""
    draw = random.Random(1)
    return [
        (
            draw.choices(range(vocab_size), k=draw.randint(60, 200)),
            SamplingParams(temperature=0, max_tokens=draw.randint(40, 140), ignore_eos=True),
        )
        for _ in range(num_requests)
    ]


def run(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]]
) -> tuple[dict[str, Any], list[list[int]]]:
    """Run all requests at once from an empty cache; returns the costs, and the tokens of each request."""
    engine.cache.reset()
    engine.loop.forget_totals()
    tokens: list[list[int]] = [[] for _ in requests]
    num_recomputed = 0
    began = time.process_time()
    for index, (prompt, sampling) in enumerate(requests):
        engine.loop.submit(engine.new_request(str(index), prompt, sampling))
    while engine.loop.has_work:
        for event in engine.loop.step():
            tokens[int(event.request_id)] += event.token_ids
            if event.finish_reason is not None and event.timings is not None:
                num_recomputed += event.timings.num_recomputed
    seconds = time.process_time() - began
    load = engine.scheduler.load(engine.loop.clock())
    figures = {
        "cpu_seconds": round(seconds, 2),
        "steps": load.num_steps,
        "preemptions": load.num_preemptions,
        "of_them_swapped": load.num_swapped,
        "tokens_computed_twice": num_recomputed,
        "tokens_from_host": load.cache.recompute_host_tokens,
        "tokens_still_there": load.cache.recompute_hit_tokens,
    }
    return figures, tokens


def compare(model: str, num_requests: int, num_rounds: int) -> dict[str, Any]:
    """Return medians over the rounds, by mode."""
    enough = engine_for(model, None, "recompute")
    requests = workload(num_requests, enough.model.vocab_size)
    needed = sum(-(-(len(prompt) + sampling.max_tokens) // PAGE_SIZE) for prompt, sampling in requests)
    engines = {"enough memory": enough} | {
        mode: engine_for(model, needed // OVERCOMMITTED, mode) for mode in MODES
    }
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for _ in range(num_rounds + 1):
        _, expected = run(enough, requests)
        for name, engine in engines.items():
            measured, tokens = run(engine, requests)
            assert tokens == expected, f"{name}: tokens differ from the run with enough memory"
            figures[name].append(measured)
    swap = engines["swap"]
    return {
        "requests": num_requests,
        "kv_pages": needed // OVERCOMMITTED,
        "kv_pages_needed": needed,
        "page_copy_us": round(swap.runner.host_memory.page_seconds * 1e6, 1),
        "prefill_tokens_per_s": round(swap.loop.load().prefill_rate),
        "modes": {
            name: {key: statistics.median(each[key] for each in rounds[1:]) for key in rounds[0]}
            for name, rounds in figures.items()  # the first round warms up
        },
    }


def engine_for(model: str, num_pages: int | None, mode: Any) -> Engine:
    """Return an engine; None for `num_pages` means as many as are of use."""
    return Engine.from_config(
        EngineConfig(
            model=model,
            device="cpu",
            page_size=PAGE_SIZE,
            kv_pages=num_pages or 4096,
            preemption=mode,
            host_kv_gib=HOST_GIB if num_pages else 0.0,
            max_model_len=512,
            threads=1,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {"embedded model": compare("demo", options.requests, options.rounds)}
    with random_model() as directory:
        results["14M random parameters"] = compare(directory, options.requests, options.rounds)
    for name, result in results.items():
        print(f"{name}: {result['requests']} requests, {result['kv_pages']} of {result['kv_pages_needed']} pages")
        for mode, figures in result["modes"].items():
            print(f"  {mode:14s} {figures}")
    if options.json:
        machine = {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()}
        options.json.write_text(json.dumps({"machine": machine, "models": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
