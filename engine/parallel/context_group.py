"""The ranks of a stage that have the same key-value heads and divide each request's KV among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d

from engine.parallel.in_stream import finish, in_stream

_c10d: Any = _distributed_c10d


class ContextGroup:
    """One rank's end of such a group. All its ranks call these operations in the same order."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        """`group`: a process group of torch with `size` ranks, of which this is number `rank`."""
        self._group, self.rank, self.size = group, rank, size

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """Return [size, ...]: the tensor of each rank, which all have one shape."""
        own = own.contiguous()
        parts: torch.Tensor = own.new_empty(self.size * len(own), *own.shape[1:])
        finish(self._group._allgather_base(parts, own, in_stream(_c10d.AllgatherOptions())))
        return parts.view(self.size, *own.shape)

    def exchanged(self, parts: torch.Tensor) -> torch.Tensor:
        """Send part i of [size, ...] to rank i; return the part from each rank, [size, ...]."""
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        finish(self._group.alltoall_base(received, parts, [], [], in_stream(_c10d.AllToAllOptions())))
        return received

    def passed_on(self, block: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to send a contiguous tensor to the next rank of the ring. Return a function that waits for the one
        from the rank before, of the same shape; neither may be changed meanwhile.
        """
        rows = block.flatten(0).view(torch.uint8)
        received = torch.empty_like(rows)
        sent, taken = [0] * self.size, [0] * self.size
        sent[(self.rank + 1) % self.size] = taken[(self.rank - 1) % self.size] = len(rows)
        work = self._group.alltoall_base(received, rows, taken, sent, _c10d.AllToAllOptions())

        def wait() -> torch.Tensor:
            work.wait()
            return received.view(block.dtype).view(block.shape)

        return wait

    def abort(self) -> None:
        """End operations that wait for a lost rank, from any thread."""
        self._group.abort()
