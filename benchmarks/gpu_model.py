"""A model of how long decode steps take on a GPU that is not at hand, beside the least time that it needs.

    python -m benchmarks.gpu_model [--gpu h200] [--context 1024] [--shared 0]

    t = max(W / (s bandwidth), 2 P B / (s rate)) + KV / (s bandwidth) + n g + m h

Of a mixture of experts, those are read that rows choose if all choices are as likely. W, P, B and KV are those of
`benchmarks/gpu_sections/limits.py`, bandwidth and rate the maker's (`deployments/simulator/planning/gpus.yaml`).
The
kernels of a step are counted on the engine's own code: n that are launched when the kernel before has ended, as
the library's products are, and m that are launched while it runs (programmatic dependent launch, from compute
capability 9.0 on). Three numbers are assumed, not measured: s, the share of the maker's rates that a kernel
reaches, and g and h, what each costs beside its bytes. Nothing of this has run on a GPU.

Behind the steps come the aims of the script for GPUs (`benchmarks/gpu_sections/aims.py`), of plain weights.

With `--shared`, rows begin with so many positions that are the same. Their KV is read once for each 64 queries of
a KV head (cascade attention), and for each row in the column "alone".
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

from benchmarks.gpu_sections.aims import MASKED, PUBLISHED, Aim, StepModel, aims_of
from benchmarks.gpu_sections.launches import count_launches
from benchmarks.gpu_sections.limits import Bytes, Limits, Rates
from benchmarks.gpu_sections.shapes import MIXTURES, MODELS, Size
from deployments.simulator.planning.known import gpu_named, gpus
from engine.kernels.triton.shared_prefixes import LEAST_SHARED

SHARE = 0.9
"""s: of the maker's rates. Assumed."""
GAP_SECONDS, EARLY_GAP_SECONDS = 1.2e-6, 0.7e-6
"""g and h: between the last byte of a kernel in a graph and the first of the next. Assumed."""
_EARLY_GPUS = ("h100", "h200")
"""Those of compute capability 9.0 and more."""
_TOGETHER = 64
"""Queries of a KV head for which what rows share is read once."""
BATCHES = (1, 32, 128)
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
"""How a checkpoint in fp8 stores matrices; in memory, 32 outputs and 128 inputs share four bytes of scale."""


def tokens_read(rows: int, context: int, shared: int, group: int) -> int:
    """Return the positions whose KV is read: those `shared` once for as many rows of `group` queries as fit."""
    most = _TOGETHER // group
    if rows < 2 or most < 2 or shared < LEAST_SHARED:
        return rows * context
    return rows * (context - shared) + -(-rows // most) * shared


class Case(NamedTuple):
    """A model and what its matrices are."""

    model: str
    weights: str
    raw: dict[str, Any]
    quantization: str | None
    """How plain weights are rounded when they are loaded."""
    weight_bytes: float


def cases() -> Iterator[Case]:
    """Yield dense models, plain and rounded, and mixtures of experts, plain and in fp8 blocks."""
    for name, raw in MODELS.items():
        yield Case(name, "bfloat16", raw, None, 2)
        yield Case(name, "fp8", raw, "fp8", 1)
    for name, raw in MIXTURES.items():
        yield Case(name, "bfloat16", raw, None, 2)
        yield Case(name, "blocks", raw | {"quantization_config": _BLOCKS}, None, 1 + 4 / (32 * 128))


def main() -> None:
    """Print a line for each model, kind of weights and number of rows, and one for each aim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200", choices=list(gpus()))
    parser.add_argument("--context", type=int, default=1024, help="positions that each row attends to")
    parser.add_argument("--shared", type=int, default=0, help="of these, positions that all rows begin with")
    given = parser.parse_args()
    if not 0 <= given.shared < given.context:
        parser.error("--shared must be less than --context, and not negative")
    gpu = gpu_named(given.gpu)
    rates = Rates(gpu.bandwidth_gb_s * 1e9, gpu.bf16_tflops * 1e12)
    early_gap = EARLY_GAP_SECONDS if given.gpu in _EARLY_GPUS else GAP_SECONDS
    gaps = f"{1e6 * GAP_SECONDS:.1f} us for each kernel, or {1e6 * early_gap:.1f} if it is launched early"
    print(f"{gpu.title}, modelled, with {SHARE:.0%} of its rates and {gaps}")
    title = f"{'model':14}{'weights':>9}{'rows':>6}{'kernels':>9}{'early':>7}"
    print(title + f"{'ms':>8}{'least ms':>10}{'share':>7}{'alone':>8}")
    aims: list[tuple[str, Aim]] = []
    for name, weights, raw, quantization, size in cases():
        group = raw["num_attention_heads"] // raw["num_key_value_heads"]
        limits = Limits(Size.of(raw), rates, Bytes(matrices=size))
        counted = count_launches(raw, quantization, 1), count_launches(raw, quantization, 2)
        steps = StepModel(limits, raw["num_hidden_layers"], SHARE, (GAP_SECONDS, early_gap), counted)
        if weights == "bfloat16":
            aims += [(name, aim) for aim in aims_of(name, steps, raw["vocab_size"], given.context)]
        for rows in BATCHES:
            late, early = (kind.of(steps.num_layers) for kind in counted[rows > 1])
            read = tokens_read(rows, given.context, given.shared, group)
            seconds, alone = steps.decode(rows, read), steps.decode(rows, rows * given.context)
            least = limits.decode(rows, read)
            figures = f"{1e3 * seconds:>8.2f}{1e3 * least:>10.2f}{least / seconds:>7.0%}{1e3 * alone:>8.2f}"
            print(f"{name:14}{weights:>9}{rows:>6}{late + early:>9}{early:>7}{figures}")
    shares = ", ".join(f"{share:.0%} by {backend}" for backend, share in PUBLISHED.items())
    print("\naims, the host being never waited for; in attention to prompts, of the rate, as published for H100:")
    print(f"{shares}; {MASKED:.0%} of that where half is masked")
    for name, aim in aims:
        bound = f"at {'most' if aim.is_cost else 'least'} {aim.wanted:.0%}"
        spent = f" ({aim.spent})" if aim.spent else ""
        missed = "" if aim.is_met else ", NOT REACHED"
        print(f"{name:14}{aim.what:>28}{aim.modelled:>8.1%}  {bound}{missed}{spent}")


if __name__ == "__main__":
    main()
