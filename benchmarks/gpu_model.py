"""A model of how long decode steps take on a GPU that is not at hand, beside the least time that it needs.

    python -m benchmarks.gpu_model [--gpu h200] [--context 1024]

    t = max(W / (s bandwidth), 2 P B / (s rate)) + KV / (s bandwidth) + n g

W, P, B and KV are those of `benchmarks/gpu_sections/limits.py`, bandwidth and rate the maker's
(`deployments/cli/planning/gpus.yaml`). n, the kernels of a step, is counted on the engine's own code. Two numbers
are assumed, not measured: s, the share of the maker's rates that a kernel reaches, and g, what a kernel of a graph
costs beside its bytes. Nothing of this has run on a GPU.
"""

from __future__ import annotations

import argparse
import os

os.environ["TRITON_INTERPRET"] = "1"

from benchmarks.gpu_sections.launches import count_launches
from benchmarks.gpu_sections.limits import Bytes, Limits, Rates
from benchmarks.gpu_sections.shapes import MODELS, Size
from deployments.cli.planning.known import gpu_named, gpus

SHARE = 0.9
"""s: of the maker's rates. Assumed."""
GAP_SECONDS = 1.2e-6
"""g: between the last byte of a kernel in a graph and the first of the next. Assumed."""
BATCHES = (1, 32, 128)


def modelled(limits: Limits, rows: int, context: int, launches: int) -> tuple[float, float]:
    """Return the seconds of a decode step, modelled and at least."""
    least = limits.decode(rows, rows * context)
    return least / SHARE + launches * GAP_SECONDS, least


def main() -> None:
    """Print a line for each model, kind of weights and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200", choices=list(gpus()))
    parser.add_argument("--context", type=int, default=1024, help="positions that each row attends to")
    given = parser.parse_args()
    gpu = gpu_named(given.gpu)
    rates = Rates(gpu.bandwidth_gb_s * 1e9, gpu.bf16_tflops * 1e12)
    print(f"{gpu.title}, modelled, with {SHARE:.0%} of its rates and {1e6 * GAP_SECONDS:.1f} us for each kernel")
    print(f"{'model':14}{'weights':>9}{'rows':>6}{'kernels':>9}{'ms':>8}{'least ms':>10}{'share':>7}")
    for name, raw in MODELS.items():
        for weights, quantization in (("bfloat16", None), ("fp8", "fp8")):
            launches = count_launches(raw, quantization).of(raw["num_hidden_layers"])
            limits = Limits(Size.of(raw), rates, Bytes(matrices=1 if quantization else 2))
            for rows in BATCHES:
                seconds, least = modelled(limits, rows, given.context, launches)
                figures = f"{1e3 * seconds:>8.2f}{1e3 * least:>10.2f}{least / seconds:>7.0%}"
                print(f"{name:14}{weights:>9}{rows:>6}{launches:>9}{figures}")


if __name__ == "__main__":
    main()
