"""Small sums over all ranks in one kernel: each rank reads all parts itself and adds them (one-shot all-reduce).

A ring passes a small tensor around in 2 (ranks - 1) steps, each of which waits for the one before. Here each rank
writes its part into memory that the others can read, signals them, waits for their signals, and reads.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from engine.kernels.float8 import makes_fp8
from engine.layers.linear import Rounded
from engine.parallel.peer_memory import PeerMemory, open_peer_memory
from engine.parallel.shard import Shard

logger = logging.getLogger(__name__)

PROGRAMS = 64
"""Maximum number of programs of a sum. Programs wait for those of other ranks, so all of them must run at the same
time, on GPUs with at least as many multiprocessors."""
_ABORTED = 2**62
"""More calls than any program ever waits for."""


class OneShotSum:
    """One rank's part in the sums. All ranks call the same ones in the same order.

    memory of a rank:  numbers of the last call, by program and rank | parts of even calls | parts of odd calls
    """

    def __init__(self, memory: PeerMemory, shard: Shard, max_bytes: int) -> None:
        """max_bytes: of a part. `memory` has `memory_bytes(max_bytes, shard.size)` bytes, all zero."""
        self._memory, self._shard, self._max_bytes = memory, shard, max_bytes
        device = memory.own.device
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Filling would launch a kernel, and to load that may wait for the kernels that `abort` releases.
        self._ends = torch.full((PROGRAMS * shard.size,), _ABORTED, dtype=torch.int64, device=device)

    def takes(self, part: torch.Tensor) -> bool:
        """Whether a part [N, size] is small enough."""
        return part.nbytes <= self._max_bytes

    def add_norm(
        self, x: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, eps: float, rounds: int = 0
    ) -> torch.Tensor | Rounded:
        """Add the sum of all ranks' `part` to `x` in place, and return its RMS norm, rounded to float8 with a
        scale for each `rounds` numbers if these are not 0. All are [N, size], the weight [size].

        Parts are added in float32 in the order of ranks, so the sums are the same on each rank, bit for bit.
        """
        from engine.kernels.triton.sum_ranks import sum_add_norm

        rank, size = self._shard.rank, self._shard.size
        memory, calls = self._memory.addresses, self._calls
        inputs = rounds if makes_fp8(x.device) else 0
        place = memory, calls, rank, size, self._max_bytes
        normed, scale = sum_add_norm(x, part, weight, eps, *place, inputs)
        if scale is not None:
            return Rounded(normed, scale, x.dtype)
        return Rounded.of(normed, rounds) if rounds else normed

    def abort(self) -> None:
        """Release kernels that wait for a lost rank, from any thread. Sums are wrong from then on."""
        signals = self._memory.own[: signal_bytes(self._shard.size)].view(torch.int64)
        if self._side is None:
            signals.copy_(self._ends)
            return
        with torch.cuda.device(signals.device), torch.cuda.stream(self._side):  # while the kernel waits
            signals.copy_(self._ends)


def signal_bytes(num_ranks: int) -> int:
    """Return the bytes before the parts."""
    return 8 * PROGRAMS * num_ranks


def memory_bytes(max_bytes: int, num_ranks: int) -> int:
    """Return the bytes of each rank's memory for parts of up to `max_bytes`."""
    return signal_bytes(num_ranks) + 2 * max_bytes


def open_one_shot(store: Any, shard: Shard, device: torch.device, max_bytes: int) -> OneShotSum | None:
    """Map all ranks' memory; all ranks call this together. None, with a warning, without such memory or Triton."""
    try:
        import engine.kernels.triton.sum_ranks  # noqa: F401

        _check_device(device)
        memory = open_peer_memory(store, shard, device, memory_bytes(max_bytes, shard.size))
    except (ImportError, AttributeError, RuntimeError) as error:
        logger.warning(
            "NCCL computes all sums over ranks, because one kernel cannot compute small ones: %s", error
        )
        return None
    return OneShotSum(memory, shard, max_bytes)


def _check_device(device: torch.device) -> None:
    """Raise RuntimeError if not all programs of a sum would run at the same time."""
    found = torch.cuda.get_device_properties(device).multi_processor_count
    if found < PROGRAMS:
        raise RuntimeError(f"the GPU has {found} multiprocessors, expected {PROGRAMS} or more")
