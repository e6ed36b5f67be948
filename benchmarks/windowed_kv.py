"""Count the requests that run at once in the same KV memory, with pages of windows apart and without.

    python -m benchmarks.windowed_kv [--tokens 1024 4096] [--requests 24] [--json FILE]

The models are random ones with few numbers in a layer, and with the layers and windows of Gemma 3 (5 of 6 layers
see 512 tokens) and gpt-oss (every other layer sees 128). All requests arrive at once, without shared prefixes;
every output must be the same with `engine.windowed_kv` on and off.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.program.engine import Engine
from engine.runner.model_runner import ModelRunner
from engine.settings.config import EngineConfig, WindowedKV
from engine.values.sampling_params import SamplingParams

PAGE_SIZE = 16
NUM_OUTPUT = 32
OF_LONGEST = 2
"""Requests of the largest size for which memory has room if all layers keep all of their KV."""
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 32_768,
    "pad_token_id": 0,
}


def save_models(directory: Path) -> Mapping[str, Path]:
    """Save a random model of each shape; returns their directories by name."""
    import torch
    import transformers

    torch.manual_seed(1)
    gemma = transformers.Gemma3TextConfig(
        **_SMALL,
        num_hidden_layers=12,
        sliding_window=512,
        layer_types=(5 * ["sliding_attention"] + ["full_attention"]) * 2,
    )
    gpt_oss = transformers.GptOssConfig(
        **_SMALL,
        num_hidden_layers=4,
        sliding_window=128,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_scaling=None,
    )
    found = {"Gemma 3": directory / "gemma3", "gpt-oss": directory / "gpt_oss"}
    transformers.Gemma3ForCausalLM(gemma).save_pretrained(found["Gemma 3"])
    transformers.GptOssForCausalLM(gpt_oss).save_pretrained(found["gpt-oss"])
    return found


def run(
    model: Path, setting: WindowedKV, kv_tokens: int, num_tokens: int, num_requests: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Run requests of so many tokens each; returns the figures, and the tokens of each answer."""
    config = EngineConfig(
        model=str(model),
        device="cpu",
        page_size=PAGE_SIZE,
        kv_pages=kv_tokens // PAGE_SIZE,
        max_step_tokens=512,
        max_step_ms=None,
        max_step_stretch=None,
        max_model_len=max(num_tokens, kv_tokens // OF_LONGEST),
        windowed_kv=setting,
    )
    engine = Engine.from_config(config)
    assert isinstance(engine.runner, ModelRunner)
    draw, sampling = random.Random(1), SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    for number in range(num_requests):
        prompt = draw.choices(range(1, 512), k=num_tokens - NUM_OUTPUT)
        engine.loop.submit(engine.new_request(str(number), prompt, sampling))
    tokens: list[list[int]] = [[] for _ in range(num_requests)]
    most, began = 0, time.monotonic()
    while engine.loop.has_work:
        for event in engine.loop.step():
            tokens[int(event.request_id)] += event.token_ids
        most = max(most, len(engine.scheduler.allocator.running))
    load = engine.scheduler.load(engine.loop.clock())
    figures = {
        "kv_mib": round(engine.runner.kv_bytes / 2**20, 1),
        "running_at_most": most,
        "steps": load.num_steps,
        "preemptions": load.num_preemptions,
        "seconds": round(time.monotonic() - began, 1),
    }
    engine.close()
    return figures, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kv_tokens, rows = OF_LONGEST * max(options.tokens), []
    with tempfile.TemporaryDirectory() as directory:
        for name, model in save_models(Path(directory)).items():
            for num_tokens in options.tokens:
                outputs = []
                settings: tuple[WindowedKV, WindowedKV] = ("off", "on")
                for setting in settings:
                    figures, tokens = run(model, setting, kv_tokens, num_tokens, options.requests)
                    rows.append({"model": name, "tokens": num_tokens, "windowed_kv": setting, **figures})
                    outputs.append(tokens)
                    print(rows[-1], flush=True)
                assert outputs[0] == outputs[1], f"{name}: the tokens differ"
    if options.json is not None:
        options.json.write_text(json.dumps({"requests": options.requests, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
