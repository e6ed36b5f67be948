"""Blocks of numbers are widened as by ggml's own Python package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from engine.loading.gguf.blocks import q4_0_codes, widened
from engine.loading.gguf.types import TYPES

QUANTIZED = {number: kind for number, kind in TYPES.items() if not kind.is_plain}


def random_blocks(number: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Return random uint8 [*shape, bytes of some blocks] of a type, in which scales are of a usual size."""
    kind, blocks = TYPES[number], 6
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (*shape, blocks, kind.block_bytes), dtype=np.uint8)
    for place in _SCALES[kind.name]:
        scales = generator.normal(0, 0.1, (*shape, blocks)).astype(np.float16)
        raw[..., place : place + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(*shape, -1)


_SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
"""Where the float16 numbers are in a block."""


@pytest.mark.parametrize(("number", "name"), [(number, kind.name) for number, kind in QUANTIZED.items()])
def test_blocks_are_widened_as_by_the_package(number: int, name: str) -> None:
    raw = random_blocks(number, 7, 5)
    expected = dequantize(raw, gguf.GGMLQuantizationType(number))
    found = widened(torch.from_numpy(raw), TYPES[number], torch.float32)
    assert found.shape == expected.shape == (7, 5, 6 * TYPES[number].block)
    assert torch.equal(found, torch.from_numpy(expected)), (found - torch.from_numpy(expected)).abs().max()
    assert torch.equal(
        widened(torch.from_numpy(raw), TYPES[number], torch.bfloat16), torch.from_numpy(expected).bfloat16()
    )


def test_the_types_are_those_of_the_package() -> None:
    for number, kind in TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (theirs.name, *gguf.GGML_QUANT_SIZES[theirs]) == (kind.name, kind.block, kind.block_bytes)


def test_more_numbers_than_are_widened_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(12, 9)
    expected = dequantize(raw, gguf.GGMLQuantizationType.Q4_K)
    monkeypatch.setattr("engine.loading.gguf.blocks._AT_ONCE", 1024)
    assert torch.equal(widened(torch.from_numpy(raw), TYPES[12], torch.float32), torch.from_numpy(expected))


def test_codes_and_scales_of_q4_0_are_its_numbers() -> None:
    raw = random_blocks(2, 3)
    codes, scales = q4_0_codes(torch.from_numpy(raw))
    numbers = (codes.float().view(3, -1, 32) - 8) * scales[..., None]
    expected = torch.from_numpy(dequantize(raw, gguf.GGMLQuantizationType.Q4_0))
    assert codes.max() <= 15
    assert torch.equal(numbers.flatten(1), expected)
