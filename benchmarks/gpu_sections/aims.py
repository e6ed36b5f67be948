"""The aims of `AIMS`, and that of top-p, modelled for a GPU that is not at hand.

    decode    as a step is modelled
    prefill   t = 2 P n / (s rate) + 4 A (D / a + C / (c a)) / rate + kernels, in steps of 8,192 tokens
    offline   prompts packed into such steps, then a decode step for each output token, of the rows that are left
    top-p     the kernels that choose tokens by it and the logits that they read, beside those of a plain sampler

The host is left out: it is taken to launch what comes next while the GPU computes. Of the pairs of positions of
which one attends to the other, C lie in the same step, where half of all are masked, and D do not. a is the share
of the maker's rate that a backend's kernels for prompts reach where nothing is masked, and c that of it which they
reach where half is. `PUBLISHED` says what others measured; s and gaps are assumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.gpu_sections.engine_runs import AIMS
from benchmarks.gpu_sections.launches import Launches
from benchmarks.gpu_sections.limits import Limits
from benchmarks.gpu_sections.workload import FULL
from engine.attention.cudnn import SHORTEST
from engine.values.sampling_params import SamplingParams

OURS = "triton"
PUBLISHED: Mapping[str, float] = {"flash_attn": 648 / 989, "cudnn": 595 / 989, OURS: 477 / 989}
"""a, of H100's 989 TFLOP/s: 16,384 positions, heads of 128, no mask. FlashAttention-3 and cuDNN: Shah et al. 2024,
figure 5 (arXiv:2407.08608). Triton: its tutorial's kernel (pytorch/benchmark#2391), which is taken to be as quick
as ours."""
MASKED = 0.85
"""c: FlashAttention-3 and cuDNN at 2,048 positions (Dao-AILab/flash-attention#1310: 0.854 and 0.835)."""
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
    spent: str = ""
    """Where the time goes."""

    @property
    def is_met(self) -> bool:
        """Whether the model says that it is reached."""
        return self.modelled <= self.wanted if self.is_cost else self.modelled >= self.wanted


class Prefill(NamedTuple):
    """Seconds of a prompt's parts."""

    products: float
    attention: float
    gaps: float


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

    def prefill(self, length: int, backend: str = OURS) -> Prefill:
        """Return the seconds of a prompt alone, of which no token is cached, with a backend for prompts."""
        steps = -(-length // FULL.max_step_tokens)
        operations = 4 * self.limits.size.attention_width
        rate = self.limits.rates.matmul
        products = max(0.0, self.limits.prefill(0, length) - operations * length * (length + 1) / 2 / rate)
        attention = 0.0
        for start in range(0, length, FULL.max_step_tokens):
            count = min(FULL.max_step_tokens, length - start)
            # cuDNN is asked where a long prompt begins; what follows is left to our own kernel.
            is_left = backend == "cudnn" and (start or count < SHORTEST)
            share = PUBLISHED[OURS if is_left else backend]
            pairs = start * count + count * (count + 1) / 2 / MASKED
            attention += operations * pairs / (share * rate)
        return Prefill(products / self.share, attention, steps * self.beside(2))

    def offline(self, prompts: Sequence[int], outputs: Sequence[int]) -> float:
        """Return the seconds of all requests at once, by their lengths."""
        computed = sum(sum(self.prefill(prompt)[:2]) for prompt in prompts)
        seconds = computed + -(-sum(prompts) // FULL.max_step_tokens) * self.beside(2)
        for step in range(1, max(outputs)):
            contexts = [prompt + step for prompt, output in zip(prompts, outputs, strict=True) if output > step]
            seconds += self.decode(len(contexts), sum(contexts))
        return seconds


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
            for length, backend in product(_PREFILLS, PUBLISHED):
                parts = steps.prefill(length, backend)
                total = sum(parts)
                shares = (f"{name} {seconds / total:.0%}" for name, seconds in parts._asdict().items())
                share = steps.limits.prefill(0, length) / total
                yield Aim(f"prefill, {length} by {backend}", share, wanted, spent=", ".join(shares))
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
    from engine.sampling.triton_chooser import TritonChooser
    from engine.values.request import Request
    from engine.values.sampling_row import SamplingRow

    names: Counter[str] = Counter()

    def note(kernel: Any, *args: Any, **options: Any) -> None:
        names[kernel.fn.__name__] += 1

    request = Request.make("r", [0], params, arrival=0.0, seed=0, namespace=Namespace("aims"))
    with patch.object(InterpretedFunction, "run", note):
        TritonChooser().choose(torch.zeros(1, 64), [SamplingRow.of(request)])
    return names
