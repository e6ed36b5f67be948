"""The aims of `AIMS`, and that of top-p, modelled for a GPU that is not at hand.

    decode    as a step is modelled
    prefill   t = 2 P n / (s rate) + 4 A (1 + ... + n) / (a rate) + kernels, in steps of 8,192 tokens
    offline   prompts packed into such steps, then a decode step for each output token, of the rows that are left
    top-p     the kernels that choose tokens by it and the logits that they read, beside those of a plain sampler

The host is left out: it is taken to launch what comes next while the GPU computes. a is the share of the maker's
rate that attention's kernels for prompts reach. Assumed, as s and gaps are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.gpu_sections.engine_runs import AIMS
from benchmarks.gpu_sections.launches import Launches
from benchmarks.gpu_sections.limits import Limits
from benchmarks.gpu_sections.workload import FULL
from engine.sampling_params import SamplingParams

ATTENTION_SHARE = 0.5
"""a. Assumed."""
TOP_P_COST = 0.05
"""The most that top-p may add to a decode step."""
_READS_LOGITS = ("_best", "_weigh", "collect")
"""Kernels of a sampler that read all logits once."""
_PREFILLS = (1024, 8192, 32_768)


class Aim(NamedTuple):
    """A figure and what it should be."""

    what: str
    modelled: float
    wanted: float
    is_cost: bool = False
    """Whether less is better."""

    @property
    def is_met(self) -> bool:
        """Whether the model says that it is reached."""
        return self.modelled <= self.wanted if self.is_cost else self.modelled >= self.wanted


@dataclass(frozen=True, slots=True)
class StepModel:
    """One model on one GPU."""

    limits: Limits
    num_layers: int
    share: float
    """s."""
    gaps: tuple[float, float]
    """Seconds beside a kernel's bytes: of those that wait for the kernel before, and of those launched early."""
    launches: tuple[tuple[Launches, Launches], tuple[Launches, Launches]]
    """Kernels of a step of one row and of several: those that wait, and those launched early."""

    def decode(self, rows: int, kv_tokens: float) -> float:
        """Return the seconds of a decode step."""
        return self.limits.decode(rows, kv_tokens) / self.share + self.beside(rows)

    def beside(self, rows: int) -> float:
        """Return the seconds of a step's kernels beside what they read and compute."""
        kinds = self.launches[rows > 1]
        return sum(gap * kind.of(self.num_layers) for gap, kind in zip(self.gaps, kinds, strict=True))

    def prefill(self, length: int) -> float:
        """Return the seconds of a prompt alone, nothing of which is cached."""
        return self._computed(length) + -(-length // FULL.max_step_tokens) * self.beside(2)

    def offline(self, prompts: Sequence[int], outputs: Sequence[int]) -> float:
        """Return the seconds of all requests at once, by their lengths."""
        seconds = sum(map(self._computed, prompts)) + -(-sum(prompts) // FULL.max_step_tokens) * self.beside(2)
        for step in range(1, max(outputs)):
            contexts = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]
            seconds += self.decode(len(contexts), sum(contexts))
        return seconds

    def _computed(self, length: int) -> float:
        attention = 4 * self.limits.size.attention_width * length * (length + 1) / 2 / self.limits.rates.matmul
        products = max(0.0, self.limits.prefill(0, length) - attention)
        return products / self.share + attention / ATTENTION_SHARE


def aims_of(model: str, steps: StepModel, vocab_size: int, context: int) -> Iterator[Aim]:
    """Yield what is aimed at for a model."""
    for (name, what), wanted in AIMS.items():
        if name != model:
            continue
        if what.startswith("decode"):
            rows = int(what.split()[1])
            least = steps.limits.decode(rows, rows * context)
            yield Aim(what, least / steps.decode(rows, rows * context), wanted)
        elif what == "prefill":
            for length in _PREFILLS:
                yield Aim(f"prefill, {length}", steps.limits.prefill(0, length) / steps.prefill(length), wanted)
        else:
            work = FULL.offline()
            lengths = [len(prompt) for prompt in work.prompts], work.outputs
            yield Aim(
                f"{what}, {FULL.requests} requests",
                steps.limits.offline(*lengths) / steps.offline(*lengths),
                wanted,
            )
    plain, cut = (_sampler_launches(SamplingParams(temperature=0.6, top_p=top_p)) for top_p in (1.0, 0.9))
    for rows in (1, 32, 128):
        passes = sum((cut - plain)[kernel] for kernel in _READS_LOGITS)
        logits = 4 * rows * vocab_size / steps.limits.rates.bandwidth / steps.share
        added = passes * logits + (cut - plain).total() * steps.gaps[0]
        yield Aim(f"top-p, {rows} rows", added / steps.decode(rows, rows * context), TOP_P_COST, is_cost=True)


def _sampler_launches(params: SamplingParams) -> Counter[str]:
    """Count the kernels with which rows that ask for this are sampled."""
    from triton.runtime.interpreter import InterpretedFunction

    from cache import Namespace
    from engine.request import Request
    from engine.sampling.row import SamplingRow
    from engine.sampling.triton_chooser import TritonChooser

    names: Counter[str] = Counter()

    def note(kernel: Any, *args: Any, **options: Any) -> None:
        names[kernel.fn.__name__] += 1

    request = Request.make("r", [0], params, arrival=0.0, seed=0, namespace=Namespace("aims"))
    with patch.object(InterpretedFunction, "run", note):
        TritonChooser().choose(torch.zeros(1, 64), [SamplingRow.of(request)])
    return names
