"""What the ranks of a model do together: NCCL's on GPUs, gloo's on CPUs; with one rank, nothing.

All of these are called by all ranks, in the same order. Process groups are made without torch's global one, so
that a process may have several engines; ranks are on one machine, and meet on its loopback address.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.parallel.shard import Shard

HOST = "127.0.0.1"
# A rank that dies ends the operation at once, as its connections close. This is for one that is alive and slow:
# the health check's `stall_timeout_s` is what a user sets.
_TIMEOUT = timedelta(minutes=30)
_torch: Any = dist  # which declares its stores and groups only in part


class Collective:
    """One rank's end."""

    def __init__(self, shard: Shard, group: Any = None) -> None:
        """`group` is one of torch's process groups, of `shard.size` ranks; None: there is only this one."""
        self.shard = shard
        self._group = group

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `part`, the same on each; may overwrite it."""
        if self._group is not None:
            part = part.contiguous()
            self._group.allreduce([part]).wait()
        return part

    def columns(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """The first `count` columns of all ranks' [R, own] side by side."""
        if self._group is None:
            return part
        rows, own = part.shape
        parts = part.new_empty(self.shard.size * rows, own)
        self._group._allgather_base(parts, part.contiguous()).wait()
        return parts.view(-1, rows, own).transpose(0, 1).reshape(rows, -1)[:, :count]

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's, which overwrites that of others."""
        if self._group is not None:
            self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
        return tensor

    def least(self, count: int, device: torch.device) -> int:
        """The smallest of all ranks' numbers."""
        if self._group is None:
            return count
        number = torch.tensor([count], device=device)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._group.allreduce([number], options).wait()
        return int(number)

    def abort(self) -> None:
        """End what waits for a rank that is gone; from any thread. Nothing can be done together after it."""
        if self._group is not None:
            self._group.abort()


ALONE = Collective(Shard())
"""The only rank."""


def open_store(size: int) -> tuple[Any, int]:
    """Where `size` ranks meet, and its port; nobody outside this machine can reach it."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return _torch.TCPStore(HOST, port, size, **options), port


def find_store(port: int, size: int) -> Any:
    """The same, for ranks that did not open it."""
    return _torch.TCPStore(HOST, port, size, is_master=False)


def join(store: Any, shard: Shard, device: torch.device) -> Collective:
    """Meet the other ranks; returns when all are there. A GPU becomes the one that this thread computes on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        kind = _torch.ProcessGroupNCCL
        options = kind.Options()
    else:
        kind = _torch.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=HOST)]
    options._timeout = _TIMEOUT
    return Collective(shard, kind(store, shard.rank, shard.size, options))
