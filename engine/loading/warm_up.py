"""Steps of every kind that needs its own kernels, so that none are compiled while requests wait.

Kernels are compiled for kinds of steps, not for sizes: values that vary from step to step are arguments for which
Triton does not specialise. Kinds differ by the longest chunk (tiles of queries, of experts and of 4-bit products)
and by the sampling parameters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from cache import Namespace
from engine.values.plan import Chunk, StepPlan, StepResult
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "logit_bias": {1: 1.0}, "repetition_penalty": 1.1, "logprobs": 1},
)
"""Sampling parameters of rows, one for each kind."""


class WarmedRunner(Protocol):
    """The runner of the steps."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step immediately."""


def warm_steps(max_step_tokens: int, max_model_len: int, page_size: int) -> Iterator[StepPlan]:
    """Yield a step of each kind: prompts of 2, 4, 8 ... tokens up to the longest, as many tokens after these, a
    decode for each sampler, and a decode with a prompt. All of them use only page 0, whose content does not matter
    yet.
    """
    longest = min(max_step_tokens, max_model_len - 1)
    length = 1
    while length < longest:
        length = min(2 * length, longest)
        yield StepPlan((_chunk(_ASKED[0], length, page_size),))
    if (before := min(longest, max_model_len - 1 - longest)) > 0:
        yield StepPlan((_chunk(_ASKED[0], longest, page_size, before=before),))
    decodes = [_chunk(asked, 1, page_size, number) for number, asked in enumerate(_ASKED)]
    yield from (StepPlan((decode,)) for decode in decodes)
    yield StepPlan(tuple(decodes))
    if longest > 1:
        yield StepPlan((decodes[0], _chunk(_ASKED[0], 2, page_size)))


def prompt_steps(lengths: Iterable[int], page_size: int) -> Iterator[StepPlan]:
    """Yield a step with one whole prompt for each length, in page 0."""
    for length in lengths:
        yield StepPlan((_chunk(_ASKED[0], length, page_size),))


def decode_step(num_rows: int, page_size: int) -> StepPlan:
    """Return a step of so many decodes in page 0."""
    return StepPlan(tuple(_chunk(_ASKED[0], 1, page_size, number) for number in range(num_rows)))


def compile_kernels(runner: WarmedRunner, steps: Iterator[StepPlan], device: torch.device) -> None:
    """Compile all Triton kernels that these steps launch, several in parallel; later starts find them on disk."""
    if device.type != "cuda":
        return
    try:
        from engine.kernels.triton.launch import compiling
    except ImportError:  # There is nothing to compile; the code that uses Triton has logged warnings.
        return
    began = time.perf_counter()
    with compiling():
        _run(runner, steps)
    logger.info("the kernels were compiled or read from disk in %.1f s", time.perf_counter() - began)


def warm_up(runner: WarmedRunner, steps: Iterator[StepPlan], device: torch.device) -> None:
    """Run the steps on a GPU, so that libraries choose and load their kernels."""
    if device.type == "cuda":
        _run(runner, steps)


def _run(runner: WarmedRunner, steps: Iterator[StepPlan]) -> None:
    for step in steps:
        runner.run(step)


def _chunk(asked: dict[str, Any], length: int, page_size: int, number: int = 0, before: int = 0) -> Chunk:
    """Return the last `length` tokens of a prompt with `before` tokens before them; a decode has at least one."""
    start = max(before, 1) if length == 1 else before
    sampling, namespace = SamplingParams(**asked), Namespace("warm-up")
    name, prompt = f"warm-up-{length}-{number}", [0] * (start + length)
    request = Request.make(name, prompt, sampling, arrival=0.0, seed=0, namespace=namespace)
    pages = [0] * (-(-(start + length) // page_size))
    return Chunk(request, start, length, [0] * length, pages, samples=True)
