"""How many kernels a recorded decode step launches: counted on the engine's own code, on a CPU, at a toy size.

Triton's kernels are noted and not run; torch's operations are those that compute something. Numbers do not depend
on a model's size, except for the number of layers, so steps of one and of two layers tell both parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_sections.random_model import load_engine
from engine.graphs.step_graphs import DecodeSize

_TOY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
_UNCOUNTED = ("aten.empty", "aten.new_empty", "aten.detach", "aten.lift_fresh")
"""Operations that launch nothing, beside views."""


class Launches(NamedTuple):
    """Kernels of one decode step, of one kind."""

    per_layer: int
    beside: int
    """Of the rest of the step: rows, embeddings, the output projection, the choice of tokens."""

    def of(self, num_layers: int) -> int:
        """Return the number for a whole model."""
        return num_layers * self.per_layer + self.beside


def count_launches(
    raw: Mapping[str, Any], quantization: str | None = None, rows: int = 1
) -> tuple[Launches, Launches]:
    """Count the kernels of a decode step of a model with such a config.json: those that are launched once the
    kernel before has ended, and those that may be launched while it runs. Needs Triton set to interpret.
    """
    small = {**raw, **{key: size for key, size in _TOY.items() if key in raw}}
    one, two = (_names({**small, "num_hidden_layers": layers}, quantization, rows) for layers in (1, 2))
    late, early = (
        Launches(two[kind].total() - one[kind].total(), 2 * one[kind].total() - two[kind].total())
        for kind in (0, 1)
    )
    return late, early


class _Counting(TorchDispatchMode):
    def __init__(self, names: Counter[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or str(func).startswith(_UNCOUNTED)):
            self._names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _names(raw: Mapping[str, Any], quantization: str | None, rows: int) -> tuple[Counter[str], Counter[str]]:
    """Return how often a step of so many rows launches each kernel: those that wait, and those launched early."""
    from triton.runtime.interpreter import InterpretedFunction

    from engine.attention.base import AttentionShape
    from engine.attention.triton import TritonAttention
    from engine.kernels.float8 import BLOCK_INPUTS
    from engine.kernels.triton import rows as row_kernels
    from engine.kernels.triton.fp8 import round_rows
    from engine.layers.linear import Fp8BlockLinear, Fp8Linear, Rounded
    from engine.layers.operations import Rotary
    from engine.models.decoder import Decoder
    from engine.models.triton_operations import TritonOperations
    from engine.sampling.graph_chooser import triton_graph_chooser

    names: Counter[str] = Counter()
    early: Counter[str] = Counter()

    def multiply(layer: Fp8Linear, x: torch.Tensor | Rounded) -> torch.Tensor:
        """What a GPU does that multiplies such numbers; a CPU would widen them."""
        if not isinstance(x, Rounded):
            x = Rounded(*round_rows(x), x.dtype)
        names["_scaled_mm"] += 1
        return torch.empty(len(x.numbers), layer.out_features, dtype=x.dtype)

    def multiply_blocks(layer: Fp8BlockLinear, x: torch.Tensor | Rounded) -> torch.Tensor:
        """The same by a kernel of our own, for few rows or for many."""
        if not isinstance(x, Rounded):
            x = Rounded(*round_rows(x, BLOCK_INPUTS), x.dtype)
        early["_block_gemm"] += 1
        return torch.empty(len(x.numbers), layer.out_features, dtype=x.dtype)

    def note(kernel: Any, *args: Any, **options: Any) -> None:
        (early if "PDL" in kernel.arg_names else names)[kernel.fn.__name__] += 1

    settings = {"device": "cpu", "attention": "reference", "kv_pages": 8, "threads": 1, "dtype": "bfloat16"}
    with TemporaryDirectory() as directory:
        runner: Any = load_engine(raw, Path(directory), **settings, quantization=quantization).runner
    decoder, facts = runner.decoder, runner.model_config
    assert isinstance(decoder, Decoder)
    decoder.operations = partial(
        TritonOperations, Rotary.of(facts.ropes, facts.head_dim, torch.bfloat16, runner.device)
    )
    heads = facts.num_heads, facts.num_kv_heads, facts.head_dim
    runner.attention = TritonAttention(AttentionShape(*heads, runner.page_size, frozenset({None})))
    graphs = runner.add_graphs(rows, lambda work: work)
    graphs._choose, graphs._rows.kernels = triton_graph_chooser(), row_kernels
    with (
        patch.object(InterpretedFunction, "run", note),
        patch.object(Fp8Linear, "forward", multiply),
        patch.object(Fp8BlockLinear, "forward", multiply_blocks),
    ):
        names.clear()
        early.clear()
        with _Counting(names):
            graphs._forward(DecodeSize(rows, runner.max_model_len))
            graphs._choose_all(rows, cuts=False)
    return names, early
