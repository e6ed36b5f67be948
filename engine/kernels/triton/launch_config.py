"""The size of an attention program on a GPU: its rows of queries and its tiles of KV in shared memory.

    bytes  =  (rows * a query's numbers + 64 * tiles held * a position's numbers) * bytes per number  +  a few KiB

A position has a key and a value; of latent KV, only a key, which holds the value.

Pages are found through the block table, so loads wait for loads: with `num_stages` 5 Triton reads two tiles ahead
(and holds three if the product is asynchronous, which takes 64 rows), with 2 one, with 1 none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.triton.kv_heads import KVHeads

_DEPTHS, _LATENT_DEPTHS = ((5, 3), (2, 2), (1, 1)), ((5, 3), (2, 2), (3, 1))
"""num_stages and the maximum number of tiles held: the deepest that fits is used. With 1, Triton would hold a tile
of latent KV twice, as keys and as values."""
_ASYNCHRONOUS_ROWS = 64
_BESIDE = 6 * 1024
"""Bytes for the weights of the second product, and for page ids."""
_MAX_PROGRAMS_PER_SM = 3
_REGISTERS_PER_SM = 65_536
_REGISTERS, _REGISTERS_WIDENING = 168, 208
"""Most registers of a thread of a compiled decode program; the second if it widens numbers of 8 bits."""
DECODE_THREADS, _LATENT_THREADS = 128, 256
"""Threads of a decode program; the second with latent KV, whose results would fill the registers of fewer."""
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
    rows: int, least_rows: int, heads: KVHeads, element_size: int, device: torch.device
) -> LaunchConfig | None:
    """Return the configuration with the most rows that fit: `rows`, half of them, and so on down to `least_rows`,
    all powers of two; None if none fits. `element_size`: bytes of a query's number.
    """
    limit = shared_memory(device)
    of_query = block_of(heads.head_dim) + (block_of(heads.rest) if heads.rest else 0)
    of_position = of_query if heads.rest else 2 * of_query
    while rows >= least_rows:
        for num_stages, held in _LATENT_DEPTHS if heads.rest else _DEPTHS:
            if rows < _ASYNCHRONOUS_ROWS:
                held = min(held, 2)
            shared_bytes = (rows * of_query + 64 * held * of_position) * element_size + _BESIDE
            if shared_bytes <= limit:
                return LaunchConfig(rows, num_stages, shared_bytes)
        rows //= 2
    return None


def decode_threads(heads: KVHeads) -> int:
    """Return the threads of a decode program."""
    return _LATENT_THREADS if heads.rest else DECODE_THREADS


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


def num_programs(
    shared_bytes: int, device: torch.device, *, widens: bool = False, threads: int = DECODE_THREADS
) -> int:
    """Return how many decode programs of such a size run at the same time on the whole GPU; `widens`: those that
    read pages of 8 bits.
    """
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    facts = torch.cuda.get_device_properties(device)
    shared_of_sm = int(facts.shared_memory_per_multiprocessor)
    per_sm = programs_per_sm(shared_bytes, shared_of_sm, widens=widens, threads=threads)
    return int(facts.multi_processor_count) * per_sm


def programs_per_sm(shared_bytes: int, shared_of_sm: int, *, widens: bool, threads: int = DECODE_THREADS) -> int:
    """Return how many decode programs share a multiprocessor, by its shared memory and its registers."""
    registers = _REGISTERS_WIDENING if widens else _REGISTERS
    held = _REGISTERS_PER_SM // (registers * threads)
    return max(1, min(shared_of_sm // shared_bytes, held, _MAX_PROGRAMS_PER_SM))
