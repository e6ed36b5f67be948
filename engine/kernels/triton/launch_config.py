"""How large an attention program may be on a GPU: queries held and tiles of KV under way, in shared memory.

    bytes  =  (rows + 2 (keys, values) * 64 * tiles held) * head_dim * bytes a number  +  a few KiB

Pages are found through the block table, so loads wait for loads: `num_stages` 5 has Triton read two tiles ahead
(three are held where the product is computed asynchronously, which takes 64 rows), 2 one, 1 none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

_DEPTHS = (5, 3), (2, 2), (1, 1)
"""num_stages, and tiles held at most: the deepest that fits is taken."""
_ASYNCHRONOUS_ROWS = 64
_BESIDE = 6 * 1024
"""Bytes: weights on their way to the second product, page ids."""
_MAX_PROGRAMS_PER_SM = 3
_INTERPRETED_PROGRAMS = 3
"""Of a launch in Triton's interpreter, which runs one after the other: enough for rows to be split."""
_UNLIMITED = 2**30


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """A program that fits."""

    rows: int
    num_stages: int
    shared_bytes: int


def largest_config(
    rows: int, least_rows: int, head_dim: int, element_size: int, device: torch.device
) -> LaunchConfig | None:
    """The most rows that fit: `rows`, or half of them, and so on down to `least_rows`, all powers of two; None:
    not even those. `element_size`: bytes of a query's number.
    """
    limit = shared_memory(device)
    number_bytes = block_of(head_dim) * element_size
    while rows >= least_rows:
        for num_stages, held in _DEPTHS:
            if rows < _ASYNCHRONOUS_ROWS:
                held = min(held, 2)
            shared_bytes = (rows + 2 * 64 * held) * number_bytes + _BESIDE
            if shared_bytes <= limit:
                return LaunchConfig(rows, num_stages, shared_bytes)
        rows //= 2
    return None


def block_of(head_dim: int) -> int:
    """Numbers of a head as kernels hold them: padded to a power of two."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    if device.type != "cuda":
        return _UNLIMITED
    facts = torch.cuda.get_device_properties(device)
    return int(
        getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block)
    )  # AMD's has one limit


def num_programs(shared_bytes: int, device: torch.device) -> int:
    """So many of a size run at once on the whole GPU."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    facts = torch.cuda.get_device_properties(device)
    beside = int(facts.shared_memory_per_multiprocessor) // shared_bytes
    return int(facts.multi_processor_count) * max(1, min(beside, _MAX_PROGRAMS_PER_SM))
