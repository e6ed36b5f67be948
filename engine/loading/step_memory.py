"""Measures how much GPU memory a step needs by running the largest one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cache import Namespace
from engine.settings.config import EngineConfig
from engine.values.plan import Chunk, Runner, StepPlan
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams


def measure_step(
    config: EngineConfig, max_model_len: int, with_pages: Callable[[int], Runner], device: torch.device
) -> int:
    """Return the bytes of GPU memory left for KV pages after the weights and the largest step's tensors.

    Raises ValueError if such a step does not fit.
    """
    num_pages = -(-max_model_len // config.page_tokens)
    before = torch.cuda.memory_allocated(device)
    try:
        runner = with_pages(num_pages)
        pages_bytes = torch.cuda.memory_allocated(device) - before
        reserved = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        runner.prepare(worst_step(config, max_model_len))()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"after weights of {before / 2**30:.2f} GiB the GPU's memory does not hold the KV of a request of "
            f"{max_model_len:,} tokens (max_model_len) and a step of {config.max_step_tokens:,} tokens "
            f"(max_step_tokens) for {config.max_running} requests (max_running): lower them, max_model_len first, "
            f"or set kv_pages. {error}"
        ) from error
    step_bytes = torch.cuda.max_memory_allocated(device) - before - pages_bytes
    # Bytes that the allocator took from the device, including libraries' workspaces and blocks that fit no later
    # tensor.
    step_bytes = max(step_bytes, torch.cuda.max_memory_reserved(device) - reserved)
    del runner
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info(device)[0]
    return max(0, free - step_bytes)


def worst_step(config: EngineConfig, max_model_len: int) -> StepPlan:
    """Return a step as large as any: the most tokens, at the end of the longest prompt, with all of them scored
    and the most rows sampled, each with counts of its tokens for penalties. All but the prompt have draft tokens.

    All rows share the same pages, because only the memory of the step matters.
    """
    pages = range(-(-max_model_len // config.page_tokens))
    sampling = SamplingParams(
        temperature=1.0, top_p=0.9, top_k=50, logprobs=20, prompt_logprobs=20, repetition_penalty=1.1
    )
    decodes = config.max_running - 1
    drafts = 0 if config.speculation is None else config.speculation.max_drafts
    if decodes:
        most = (config.max_step_tokens - config.max_running) // 2 // decodes
        drafts = max(0, min(drafts, most, max_model_len - 1))
    longest = min(config.max_step_tokens - decodes * (1 + drafts), max_model_len)
    sizes = [1 + drafts] * decodes + [max(1, longest)]
    chunks = []
    for row, size in enumerate(sizes):
        is_prompt = row == decodes
        prompt = [0] * max_model_len if is_prompt else ()
        request = Request.make(
            f"warmup-{row}", prompt, sampling, arrival=0.0, seed=row, namespace=Namespace("warmup")
        )
        start = max_model_len - size
        num_drafts = 0 if is_prompt else drafts
        chunks.append(Chunk(request, start, size, [0] * size, pages, samples=True, num_drafts=num_drafts))
    return StepPlan(tuple(chunks))
