"""Blocks of numbers are widened as by ggml's own Python package."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf.quants import dequantize

from engine.gguf.types import TYPES
from engine.loading.gguf_blocks import widened
from tests.engine.support.gguf_models import random_blocks

QUANTIZED = {number: kind for number, kind in TYPES.items() if not kind.is_plain}


@pytest.mark.parametrize(("number", "name"), [(number, kind.name) for number, kind in QUANTIZED.items()])
def test_blocks_are_widened_as_by_the_package(number: int, name: str) -> None:
    raw = random_blocks(gguf.GGMLQuantizationType(number), 7, 5, 6 * TYPES[number].block)
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


def test_numbers_that_are_widened_in_several_parts_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(gguf.GGMLQuantizationType.Q4_K, 9, 6 * 256)
    expected = dequantize(raw, gguf.GGMLQuantizationType.Q4_K)
    monkeypatch.setattr("engine.loading.gguf_blocks._AT_ONCE", 1024)
    assert torch.equal(widened(torch.from_numpy(raw), TYPES[12], torch.float32), torch.from_numpy(expected))
