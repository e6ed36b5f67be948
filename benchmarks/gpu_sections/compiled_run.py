"""A model of transformers, compiled by torch, that decodes one row with SDPA over a cache of fixed size.

This is what torch reaches without an engine: no pages, no batch, no scheduler, greedy tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_sections.limits import Limits
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import seconds_of
from benchmarks.gpu_sections.workload import Workload

_STEPS = 32


def compiled_decode(
    model: str, raw: Mapping[str, Any], limits: Limits, work: Workload, device: torch.device
) -> Iterator[Measurement]:
    """Yield the time of a step after a context as long as the engine's decodes have."""
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    is_gpu = device.type == "cuda"
    config = AutoConfig.for_model(**raw)
    with device, torch.inference_mode():
        decoder = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if is_gpu else torch.float32, attn_implementation="sdpa"
        ).eval()
        cache = StaticCache(config=config, max_cache_len=work.context + _STEPS)
        prompt = torch.randint(work.max_token_id, (1, work.context))
        decoder(prompt, past_key_values=cache, use_cache=True)
        options: dict[str, Any] = {"mode": "reduce-overhead"} if is_gpu else {"backend": "eager"}
        compiled = torch.compile(decoder.forward, **options)
        token, position = prompt[:, -1:].clone(), torch.full((1, 1), work.context)

        def step() -> None:
            if is_gpu:
                torch.compiler.cudagraph_mark_step_begin()
            logits = compiled(token, past_key_values=cache, position_ids=position, use_cache=True).logits
            token.copy_(logits[:, -1:].argmax(-1))

        for _ in range(3):  # compiles, records
            step()
        seconds = seconds_of(step, device, tries=3, calls=_STEPS // 4)
    shares = limits.shares(partial(Limits.decode, rows=1, kv_tokens=work.context), seconds)
    note = f"torch {torch.__version__}, mode reduce-overhead" if is_gpu else "not compiled on a CPU"
    yield Measurement("decode, 1 row", model, "torch.compile", 1 / seconds, 1000 * seconds, **shares, note=note)
