"""Float8 on GPUs: the blocks in which numbers share a scale, and the devices that multiply such numbers."""

from __future__ import annotations

import functools

import torch

BLOCK_INPUTS = 128
"""Inputs that share a scale in a matrix with scales in blocks."""
BLOCK_OUTPUTS = 32
"""Outputs that share a scale in memory; a checkpoint's block has a multiple of these."""


@functools.cache
def multiplies_fp8(device: torch.device) -> bool:
    """Whether a GPU has products of float8, and so can also round to it."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def makes_fp8(device: torch.device) -> bool:
    """Whether kernels can round to float8 and multiply such numbers, as Triton's interpreter also can."""
    return device.type != "cuda" or multiplies_fp8(device)
