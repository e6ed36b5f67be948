"""The size of an attention program on a GPU: its rows of queries and its tiles of KV in shared memory.

    bytes  =  (rows + 2 (keys, values) * 64 * tiles held) * head_dim * bytes per number  +  a few KiB

Pages are found through the block table, so loads wait for loads: with `num_stages` 5 Triton reads two tiles ahead
(and holds three if the product is asynchronous, which takes 64 rows), with 2 one, with 1 none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_DEPTHS = (5, 3), (2, 2), (1, 1)
"""num_stages and the maximum number of tiles held: the deepest that fits is used."""
_ASYNCHRONOUS_ROWS = 64
_BESIDE = 6 * 1024
"""Bytes for the weights of the second product, and for page ids."""
_MAX_PROGRAMS_PER_SM = 3
_REGISTERS_PER_SM = 65_536
_REGISTERS, _REGISTERS_WIDENING = 168, 208
"""Most registers of a thread of a compiled decode program; the second if it widens numbers of 8 bits."""
DECODE_THREADS = 128
"""Threads of a decode program."""
_INTERPRETED_PROGRAMS = 3
"""Programs of a launch in Triton's interpreter, which runs them one by one: enough for rows to be split."""
_UNLIMITED = 2**30


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The launch configuration of a program that fits."""

    rows: int
    num_stages: int
    shared_bytes: int


def largest_config(
    rows: int, least_rows: int, head_dim: int, element_size: int, device: torch.device
) -> LaunchConfig | None:
    """Return the configuration with the most rows that fit: `rows`, half of them, and so on down to `least_rows`,
    all powers of two; None if none fits. `element_size`: bytes of a query's number.
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
    """Return head_dim padded to a power of two, as kernels hold it."""
    return max(16, power_of_2(head_dim))


def power_of_2(number: int) -> int:
    """Return the least power of two that is at least a positive number; Triton's function is slow."""
    return 1 << (number - 1).bit_length()


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return _UNLIMITED
    facts = torch.cuda.get_device_properties(device)
    return int(
        getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block)
    )  # AMD GPUs have only one limit.


def num_programs(shared_bytes: int, device: torch.device, *, widens: bool = False) -> int:
    """Return how many decode programs of such a size run at the same time on the whole GPU; `widens`: those that
    read pages of 8 bits.
    """
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    facts = torch.cuda.get_device_properties(device)
    per_sm = programs_per_sm(shared_bytes, int(facts.shared_memory_per_multiprocessor), widens=widens)
    return int(facts.multi_processor_count) * per_sm


def programs_per_sm(shared_bytes: int, shared_of_sm: int, *, widens: bool) -> int:
    """Return how many decode programs share a multiprocessor, by its shared memory and its registers."""
    registers = _REGISTERS_WIDENING if widens else _REGISTERS
    held = _REGISTERS_PER_SM // (registers * DECODE_THREADS)
    return max(1, min(shared_of_sm // shared_bytes, held, _MAX_PROGRAMS_PER_SM))
