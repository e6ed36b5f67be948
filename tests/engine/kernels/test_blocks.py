"""Products of matrices whose inputs have scales in groups are those of the widened matrices, bit for bit."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import native
from engine.layers.grouped_linear import Grouping

TO_FLOATS, _, SWIGLU = range(3)
GROUPINGS = [*itertools.starmap(Grouping, itertools.product((4, 8), (16, 32), (2, 4), (False, True)))]


class Grouped:
    """A random matrix in blocks, and the same one widened and packed."""

    def __init__(
        self,
        kernels: native.Kernels,
        grouping: Grouping,
        outputs: int,
        inputs: int,
        product: int,
        seed: int,
    ) -> None:
        self.kernels, self.product, self.outputs = kernels, product, outputs
        groups, generator = native.NativeGrouping(*grouping), torch.Generator().manual_seed(seed)
        first, most = {4: (0, 15) if groups.has_leasts else (-8, 7), 8: (-128, 127)}[groups.bits]
        codes = torch.randint(first, most + 1, (outputs, inputs), generator=generator, dtype=torch.int8)
        shape = outputs, inputs // groups.inputs
        scales, leasts = ((torch.randn(shape, generator=generator) * 1e-2).half() for _ in range(2))
        if groups.scale_bytes == 4:  # A scale times a small integer; times a code, it has at most 24 bits.
            scales, leasts = (
                each.float() * torch.randint(1, 32, shape, generator=generator) for each in (scales, leasts)
            )
        weight = codes.float().unflatten(1, (-1, groups.inputs)) * scales.float()[..., None]
        if groups.has_leasts:
            weight += leasts.float()[..., None]
        self.weight = weight.flatten(1).to(kernels.dtype)
        panels, block_bytes = -(-outputs // 32), grouping.block_bytes
        packed = torch.full((panels * inputs // 32 * block_bytes + 64,), 0x55, dtype=torch.uint8)
        self.memory = packed, torch.empty(panels * 32 * inputs, dtype=kernels.dtype)
        shape_and_place = outputs, inputs, product == SWIGLU
        kernels.pack_blocks(
            codes.data_ptr(),
            scales.data_ptr(),
            leasts.data_ptr() if groups.has_leasts else None,
            ctypes.byref(groups),
            *shape_and_place,
            packed.data_ptr(),
        )
        assert (packed[-64:] == 0x55).all(), "memory beyond the blocks was written"
        kernels.pack(self.weight.data_ptr(), *shape_and_place, self.memory[1].data_ptr())
        self.linears = [
            native.NativeLinear(packed.data_ptr(), None, None, outputs, inputs, groups=groups),
            native.NativeLinear(self.memory[1].data_ptr(), None, None, outputs, inputs),
        ]

    def products(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The products of rows with the blocks and with the widened matrix."""
        padded = torch.zeros(-(-len(x) // 16) * 16, x.shape[1], dtype=x.dtype)
        padded[: len(x)] = x
        is_gated = self.product == SWIGLU
        width = self.outputs // 2 if is_gated else self.outputs
        results = []
        for linear in self.linears:
            out = torch.full((len(x), width), torch.nan, dtype=x.dtype if is_gated else torch.float32)
            place = out.data_ptr(), width, 2
            self.kernels.linear(ctypes.byref(linear), padded.data_ptr(), x.shape[1], len(x), self.product, *place)
            results.append(out)
        return results


@pytest.mark.parametrize("grouping", GROUPINGS, ids=lambda each: "-".join(map(str, each)))
def test_products_are_those_of_the_widened_matrix(kernels: native.Kernels, grouping: Grouping) -> None:
    """For few rows and for many, which other kernels multiply; for inputs that are many slices of an L1 cache."""
    for seed, (outputs, inputs, product) in enumerate(
        [(40, 96, TO_FLOATS), (96, 544, SWIGLU), (64, 288, TO_FLOATS)]
    ):
        matrix = Grouped(kernels, grouping, outputs, inputs, product, seed)
        for rows in (1, 9, 70):
            x = torch.randn(rows, inputs).to(kernels.dtype)
            ours, expected = matrix.products(x)
            assert torch.equal(ours, expected), (rows, outputs, inputs)


@given(
    grouping=st.sampled_from(GROUPINGS),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 5),
    rows=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_any_shape(grouping: Grouping, outputs: int, blocks: int, rows: int, seed: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        matrix = Grouped(native.kernels(dtype), grouping, outputs, 32 * blocks, TO_FLOATS, seed)
        ours, expected = matrix.products(torch.randn(rows, 32 * blocks).to(dtype))
        assert torch.equal(ours, expected)
