"""The offline workload in transformers' continuous batching: the same shape, random weights of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

from benchmarks.gpu_sections.limits import Limits
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.workload import Offline, Workload


def transformers_offline(
    model: str, raw: Mapping[str, Any], limits: Limits, work: Workload, device: torch.device, patience_s: float
) -> Iterator[Measurement]:
    """Output tokens over all the time it takes once it is warm; or what came in `patience_s` seconds."""
    manager, attention = _manager(raw, work, device)
    offline = work.offline()
    try:
        tokens, seconds = _generate(manager, offline, patience_s)
    finally:
        manager.stop(block=True, timeout=5.0)
    total = sum(offline.outputs)
    note = f"{total} output tokens, attention {attention}"
    what = f"offline, {len(offline.outputs)} requests"
    if tokens < total:
        note = f"cut off after {seconds:.0f} s: {tokens} of {total} tokens in answers that had ended, {attention}"
        yield Measurement(what, model, "transformers", tokens_per_s=tokens / seconds, note=note)
        return
    lengths = [len(prompt) for prompt in offline.prompts]
    shares = limits.shares(partial(Limits.offline, prompts=lengths, outputs=offline.outputs), seconds)
    yield Measurement(what, model, "transformers", tokens / seconds, 1000 * seconds, **shares, note=note)


def _manager(raw: Mapping[str, Any], work: Workload, device: torch.device) -> tuple[Any, str]:
    from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    config = AutoConfig.for_model(**raw)
    is_gpu = device.type == "cuda"
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if is_gpu else torch.float32, attn_implementation="sdpa"
        ).eval()
    generation = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=work.longest
    )
    options: dict[str, Any] = {}
    if "auto_switch_to_flash" in signature(ContinuousBatchingConfig).parameters:  # not in 5.17 and before
        options["auto_switch_to_flash"] = find_spec("flash_attn") is not None  # left alone it looks on the hub
    if not is_gpu:
        options |= {"num_blocks": 2 * work.requests, "max_batch_tokens": 512}
    manager = model.init_continuous_batching(
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**options),
        workload_hints=_hints(work),
    )
    manager.warmup()
    manager.start()
    return manager, str(model.config._attn_implementation)


def _hints(work: Workload) -> Any:
    """What lets it choose its sizes well."""
    from transformers.generation.continuous_batching.utils import WorkloadHints

    return WorkloadHints(work.longest, work.longest, work.requests)


def _generate(manager: Any, offline: Offline, patience_s: float) -> tuple[int, float]:
    """Tokens of answers that ended, and seconds. Raises RuntimeError when its thread ends before."""
    started = time.perf_counter()
    for prompt, length in zip(offline.prompts, offline.outputs, strict=True):
        manager.add_request(prompt, max_new_tokens=length)
    num_tokens, num_left = 0, len(offline.prompts)
    while num_left and time.perf_counter() - started < patience_s:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its generation thread ended")
            continue
        if result.is_finished():
            if result.error is not None:
                raise RuntimeError(str(result.error))
            num_tokens += len(result.generated_tokens)
            num_left -= 1
    return num_tokens, time.perf_counter() - started
