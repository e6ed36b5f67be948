"""A rank of a one-shot sum as a process, in Triton's interpreter: ranks map one file, as GPUs map memory.

python -m tests.engine.support.summing_ranks DIRECTORY RANK NUM_RANKS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

from engine.layers.linear import Rounded
from engine.parallel.one_shot import OneShotSum, memory_bytes
from engine.parallel.peer_memory import PeerMemory
from engine.parallel.shard import Shard

SIZE, MAX_ROWS = 48, 66
MAX_BYTES = MAX_ROWS * SIZE * 4
EPS = 1e-5
CALLS = [
    (3, torch.float32, 0),
    (1, torch.float16, 0),
    (66, torch.float16, SIZE),
    (2, torch.float32, 16),
    (3, torch.float32, 0),
]
"""Rows and type of each sum, with fewer rows than programs and with more, and how many numbers of its norm share a
scale."""


def numbers(call: int, rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a part, or with rank -1 the stream to which the sum is added."""
    generator = torch.Generator().manual_seed(100 * call + rank + 1)
    return torch.randn(rows, SIZE, generator=generator).to(dtype)


def weight_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(0.5, 2, SIZE).to(dtype)


def mapped(path: Path, rank: int, num_ranks: int, max_bytes: int) -> PeerMemory:
    """Map the memory of all ranks, which are parts of a file."""
    size = memory_bytes(max_bytes, num_ranks)
    whole = torch.from_file(str(path), shared=True, size=num_ranks * size, dtype=torch.uint8)
    parts = whole.view(num_ranks, size)
    return PeerMemory(parts[rank], torch.tensor([part.data_ptr() for part in parts]), whole)


def main() -> None:
    directory, rank, num_ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    memory = mapped(directory / "memory", rank, num_ranks, MAX_BYTES)
    one_shot = OneShotSum(memory, Shard(rank, num_ranks), MAX_BYTES)
    found = []
    for call, (rows, dtype, rounds) in enumerate(CALLS):
        x = numbers(call, -1, rows, dtype)
        normed = one_shot.add_norm(x, numbers(call, rank, rows, dtype), weight_of(dtype), EPS, rounds)
        found.append((x, tuple(normed[:2]) if isinstance(normed, Rounded) else normed))
    torch.save(found, directory / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
