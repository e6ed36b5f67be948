"""The variants of kernels that an engine's steps ask Triton for, on a machine without a GPU: see test_warm_up.py.

Nothing is compiled and no kernel runs: for each launch, Triton itself tells under which key it would look for the
compiled kernel. Prints one JSON object: the numbers of keys of the warm-up, and the kernels with keys that only
came later, in random steps.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

from benchmarks.gpu_sections.random_model import random_decoder
from benchmarks.gpu_sections.shapes import SMALL
from cache import Namespace
from engine.kernels.triton.launch import compiling
from engine.loading.load_model import load_model
from engine.loading.warm_up import warm_steps
from engine.models.triton_delta_net import TritonDeltaHeads
from engine.runner.model_runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.sampling.triton_chooser import TritonChooser
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.values.plan import Chunk, StepPlan
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from tests.engine.support.compiled_kernels import name_of
from tests.engine.support.recorded_graphs import Recording
from tests.engine.support.runner_parts import graphs_of_gpus, with_our_kernels

CPU, HOPPER = torch.device("cpu"), GPUTarget("cuda", 90, 32)
PAGE_SIZE, PAGES, MAX_RUNNING, MAX_LEN, MAX_TOKENS = 16, 64, 13, 400, 300
PIECE_TOKENS, MAX_DRAFTS = 256, 4
DENSE = SMALL["tiny"] | {"vocab_size": 5000, "num_attention_heads": 8}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
BLOCKS = EXPERTS | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "head_dim": 32,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
RECURRENT = DENSE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "mlp_only_layers": [0, 1],
}
FOUR_BITS = BLOCKS | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.1},
    {"temperature": 1.0, "logprobs": 2, "presence_penalty": 1.0},
    {"temperature": 0.0, "logit_bias": {3: 1.0, 7: -1.0, 9: 2.0}},
    {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 3, "stop_token_ids": (4, 5)},
)


class Keys:
    """Stands in for Triton's launches."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        _, key_cache, _, _, binder = kernel.device_caches[0]
        _, specialization, parsed = binder(*args, **options, debug=False, instrumentation_mode="")
        self.seen.add((name_of(kernel), compute_cache_key(key_cache, specialization, parsed)))
        if kernel.__name__ == "_draw" and not warmup:
            args[kernel.arg_names.index("tokens_ptr")].zero_()  # Tokens that exist, as the kernel does not run.


def runner_of(raw: dict[str, Any], directory: Path) -> ModelRunner:
    """Return a runner on the CPU that launches what one on a GPU does."""
    (directory / "config.json").write_text(json.dumps(raw))
    config = EngineConfig(
        str(directory),
        device="cpu",
        attention="reference",
        page_size=PAGE_SIZE,
        kv_pages=PAGES,
        threads=1,
        speculation=Speculation(method="ngram", max_drafts=MAX_DRAFTS),
    )
    with patch("engine.runner.model_runner.sampler_for", lambda eos, device: Sampler(eos, TritonChooser())):
        return with_our_kernels(load_model(config, load_weights=random_decoder))


def random_step(rng: random.Random, number: int) -> StepPlan:
    """Return decodes, prompts or both, of any lengths, which ask for anything or nothing; some have drafts."""
    num_decodes, num_prompts = rng.choice(
        [(rng.randint(1, MAX_RUNNING), 0), (rng.randint(0, 9), rng.randint(1, 3))]
    )
    is_drafted = num_prompts > 0 and rng.random() < 0.5
    asked = rng.choice([ASKED[:1], ASKED[:2], ASKED])
    chunks = []
    for row in range(num_decodes + num_prompts):
        is_decode = row < num_decodes
        most = MAX_DRAFTS + 1 if is_drafted else rng.choice([4, 40, MAX_TOKENS // max(1, num_prompts)])
        size = 1 if is_decode else rng.randint(2, most)
        start = rng.randint(1, MAX_LEN - 1 - size)
        sampling, namespace = SamplingParams(**rng.choice(asked)), Namespace("m")
        prompt = [rng.randrange(5000) for _ in range(start + (rng.randint(0, size) if start > 1 else size))]
        request = Request.make(f"{number}-{row}", prompt, sampling, arrival=0.0, seed=row, namespace=namespace)
        request.tokens += [0] * (start + size - request.num_tokens)
        pages = [rng.randrange(PAGES) for _ in range((start + size - 1) // PAGE_SIZE + 1)]
        drafts = size - 1 if is_drafted else 0
        chunks.append(Chunk(request, start, size, request.tokens[start:], pages, samples=True, num_drafts=drafts))
    return StepPlan(tuple(chunks))


def kind_of(plan: StepPlan) -> str:
    """Return which graphs replay such a step as a whole."""
    if plan.num_drafts:
        return "drafts"
    longest = max(chunk.num_tokens for chunk in plan.chunks)
    return "decodes" if longest == 1 else "a few tokens a row" if longest <= MAX_DRAFTS + 1 else "prompts"


def later(raw: dict[str, Any], num_steps: int) -> tuple[int, list[str], int, list[str]]:
    """Return the number of the warm-up's keys, the kernels with others in random steps, the steps replayed, and
    which kinds of graphs that were.
    """
    keys, recording, rng = Keys(), Recording(), random.Random(5)
    kinds: set[str] = set()
    with (
        TemporaryDirectory() as directory,
        patch.object(JITFunction, "run", lambda kernel, *args, **options: keys.run(kernel, *args, **options)),
        patch("engine.models.delta_net.kind_of_heads", lambda shape, conv: TritonDeltaHeads),
    ):
        runner = runner_of(raw, Path(directory))
        torch.use_deterministic_algorithms(True)  # Memory that nobody wrote has numbers that nobody expects.
        with compiling():
            for step in warm_steps(MAX_TOKENS, MAX_LEN, PAGE_SIZE):
                runner.run(step)
        torch.use_deterministic_algorithms(False)
        with graphs_of_gpus():
            runner.add_graphs(MAX_RUNNING, recording)
        others = runner.add_token_graphs(MAX_RUNNING, PIECE_TOKENS, (2, MAX_DRAFTS + 1), recording)
        others.capture_all()
        for step in warm_steps(MAX_TOKENS, MAX_LEN, PAGE_SIZE):
            runner.run(step)
        warm = set(keys.seen)
        for number in range(num_steps):
            before = recording.num_cuts
            plan = random_step(rng, number)
            if runner.run(plan).is_replayed:
                kinds.add("pieces" if recording.num_cuts > before else kind_of(plan))
    new = sorted(f"{name} {key}" for name, key in keys.seen - warm)
    return len(warm), new, recording.num_replayed, sorted(kinds)


def main() -> None:
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: HOPPER, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    reports = {}
    models = (
        ("dense", DENSE, 300),
        ("experts", EXPERTS, 100),
        ("blocks", BLOCKS, 60),
        ("int4", FOUR_BITS, 60),
        ("recurrent", RECURRENT, 100),
    )
    for name, raw, num_steps in models:
        warm, new, replayed, kinds = later(raw, num_steps)
        reports[name] = {"warm": warm, "new": new, "replayed": replayed, "kinds": kinds}
    json.dump(reports, sys.stdout)


if __name__ == "__main__":
    main()
